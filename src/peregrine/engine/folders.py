"""Finds a model's folder by path, by the name of an embedded model, or by Hugging Face hub id."""

import contextlib
from pathlib import Path

from peregrine.errors import CheckpointError, shown

ASSETS = Path(__file__).parents[1] / "assets"
NEEDED = ["*.json", "*.safetensors", "*.jinja"]


def embedded_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_model(name: str) -> Path:
    """The folder of a model; CheckpointError says where it was looked for."""
    if name in embedded_models():
        return ASSETS / name
    with contextlib.suppress(OSError, ValueError):  # a name that no path can have
        if Path(name).exists():
            return Path(name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return from_hub(name)
    embedded = ", ".join(embedded_models()) or "none"
    raise CheckpointError(
        f"model={shown(name)}: no such folder, and not an embedded model (embedded: {embedded}); "
        "pass a folder in Hugging Face format"
    )


def from_hub(name: str) -> Path:
    """The snapshot of a hub id, from the local cache or downloaded."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"model={name!r}: no such folder, and hub ids need huggingface_hub; install it or pass a folder"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=NEEDED))
    except Exception as error:
        raise CheckpointError(
            f"model={name!r}: no such folder, and the hub did not give it ({type(error).__name__}: {error}); "
            "check the name and the network, or pass a folder"
        ) from error
