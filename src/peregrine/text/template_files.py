"""The chat templates of a checkpoint folder, unparsed."""

from collections.abc import Mapping
from pathlib import Path

from peregrine.errors import CheckpointError
from peregrine.files import read_text


def chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name; files take precedence over tokenizer_config.json."""
    files = sorted((folder / "chat_templates").glob("*.jinja"))
    templates = {path.stem: read_text(path) for path in files}
    single = folder / "chat_template.jinja"
    if single.exists():
        templates["default"] = read_text(single)
    if templates:
        return templates
    written = config.get("chat_template")
    if isinstance(written, str):
        return {"default": written}
    if written is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in written}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: chat_template is neither a string nor a list of "
            '{"name": ..., "template": ...}; correct it, or put the template in chat_template.jinja'
        ) from error
