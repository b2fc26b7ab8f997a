"""The config of a checkpoint, wherever it is written: in config.json, or in the metadata of a GGUF file."""

from pathlib import Path

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.gguf.config import config_fields
from peregrine.models.checkpoint.gguf.file import open_header
from peregrine.models.checkpoint.gguf.header import is_gguf


def read_config_file(checkpoint: Path) -> Fields:
    """The fields of a folder's config.json, or those that a GGUF file's metadata amounts to."""
    return config_fields(open_header(checkpoint)) if is_gguf(checkpoint) else Fields.read(checkpoint / "config.json")
