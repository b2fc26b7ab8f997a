"""The sampling defaults of a checkpoint: what its authors recommend in generation_config.json."""

from pathlib import Path

from peregrine.errors import CheckpointError, RequestError
from peregrine.models.checkpoint.folder import Fields
from peregrine.sampling import sampling_params

# The parameters that vLLM takes, too.
TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that say nothing about sampling: ids are read with the config, and whether to sample follows from temperature.
NEUTRAL = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "transformers_version", "_from_model_config"}


def sampling_defaults(folder: Path) -> tuple[dict[str, object], str]:
    """Sampling parameters that generation_config.json sets, and what to say about them."""
    path = folder / "generation_config.json"
    fields = Fields.read(path).values if path.exists() else {}
    taken = {name: fields[name] for name in TAKEN if fields.get(name) is not None}
    try:
        sampling_params(**taken)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}; correct it, or choose generation_config='none'") from error
    because = f"{path.name}; a request's own values win" if taken else f"{path.name} sets no sampling defaults"
    rest = sorted(name for name, value in fields.items() if value is not None and name not in {*TAKEN, *NEUTRAL})
    return taken, because + (f"; it is not asked for {', '.join(rest)}" if rest else "")
