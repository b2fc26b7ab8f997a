"""What an answer of a batch depends on, as a hash: the request, the weights, and what stands for fields left out.

Speculation, page size, batch size and the like are not part of it, because they change no token.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from peregrine.config import EngineConfig
from peregrine.engine.folders import find_model
from peregrine.serve.responses import ENDPOINTS

ID_PREFIX = "batch_req_"
TEXT_FILES, WEIGHT_FILES = (".json", ".jinja"), (".safetensors", ".gguf")
# Options of the engine that change tokens or the defaults of parameters; those that this version has.
OPTIONS = ("dtype", "kv_dtype", "generation_config")
# So many blocks of a file of weights are read: another training of the model differs in almost every one.
BLOCKS, BLOCK_BYTES = 64, 2**16


def answer_id(request: Mapping[str, object], served: str) -> str:
    """The id of an answer to this request by what is `served`."""
    asked = json.dumps([served, request], sort_keys=True)
    return ID_PREFIX + hashlib.sha256(asked.encode()).hexdigest()[:32]


def served_hash(name: str, config: EngineConfig) -> str:
    """A hash of everything besides the request: the model, its name in bodies, options and defaults."""
    options = {field: str(value) for field, value in asdict(config).items() if field in OPTIONS}
    defaults = {
        url: {field: str(info.default) for field, info in endpoint.body.model_fields.items()}
        for url, endpoint in ENDPOINTS.items()
    }
    parts = json.dumps([name, options, defaults, model_hash(find_model(config.model))], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def model_hash(path: Path) -> str:
    """A hash of a model's files: names, sizes and contents, of weights evenly spaced blocks."""
    found = hashlib.sha256()
    files = sorted([*path.iterdir(), *(path / "chat_templates").glob("*")]) if path.is_dir() else [path]
    for file in (file for file in files if file.suffix in {*TEXT_FILES, *WEIGHT_FILES} and file.is_file()):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        step = max(BLOCK_BYTES, size // BLOCKS) if file.suffix in WEIGHT_FILES else BLOCK_BYTES
        with file.open("rb") as stream:
            for start in range(0, size, step):
                stream.seek(start)
                found.update(stream.read(BLOCK_BYTES))
    return found.hexdigest()
