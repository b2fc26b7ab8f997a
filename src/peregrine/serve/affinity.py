"""Which requests a router sends to one replica: those whose prompts begin alike, since it has the beginning cached."""

import json
from hashlib import sha256

PREFIX_CHARS = 1024  # of a prompt; a beginning that is shared but shorter is cheap to read everywhere
SYSTEM_ROLES = ("system", "developer")


def affinity_key(body: bytes, session: str | None) -> str | None:
    """A key that stays the same over the turns of a chat; None: any replica will do.

    A session or `prompt_cache_key` that the client names comes first. Otherwise a chat's key is made from its system
    messages and the first message after them, and a completion's from the first characters of its first prompt.
    """
    if session:
        return session
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the replica will say what is wrong with it
        return None
    if not isinstance(fields, dict):
        return None
    start = fields.get("prompt_cache_key") or chat_start(fields.get("messages")) or prompt_start(fields.get("prompt"))
    return sha256(json.dumps(start).encode()).hexdigest()[:32] if start else None


def chat_start(messages: object) -> list[object]:
    """The messages up to the first one that is not the system's, that one included."""
    start: list[object] = []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            break
        start.append([message.get("role"), message.get("content")])
        if message.get("role") not in SYSTEM_ROLES:
            break
    return start


def prompt_start(prompt: object) -> object:
    """The beginning of a prompt, or of the first of several: characters or token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    return prompt[:PREFIX_CHARS] if isinstance(prompt, list | str) else None
