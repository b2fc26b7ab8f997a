"""A checkpoint's safetensors files, or its GGUF file, as one set of named tensors, mapped and read one at a time.

Pickles are never opened: they run code. Float8 and MXFP4 tensors are multiplied by their scales as they are read; the
scales do not count as tensors. Names and shapes are compared with the plan before anything is allocated, and every
mismatch is named at once.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peregrine.errors import CheckpointError
from peregrine.files import check_regular, read_object
from peregrine.models.checkpoint import fp8, mxfp4
from peregrine.models.checkpoint.folder import open_folder
from peregrine.models.checkpoint.gguf.file import GGUFFile
from peregrine.models.checkpoint.gguf.header import is_gguf
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.layers import Linear, Packable, cache_attributes

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = ("F32", "F16", "BF16")
_NAMED = 8  # how many tensors a message names before it counts the rest


class Weights:
    """The tensors of a folder by name; opening reads headers alone."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = open_folder(folder)
        self._files: dict[str, Any] = {}  # tensor -> the open file that holds it
        for path in _weight_files(self.folder):
            opened = _open(path)
            self._files.update(dict.fromkeys(opened.keys(), opened))
        self._files = mxfp4.join_stacks(self._files)
        self._blocks = fp8.folder_blocks(self.folder)
        self._scales: dict[str, str] = {}  # float8 tensor -> the tensor that holds its scales
        if self._blocks is not None:
            scales = {name: name + fp8.SCALE_SUFFIX for name in self._files}
            self._scales = {name: scale for name, scale in scales.items() if scale in self._files}

    @staticmethod
    def of(source: "str | Path | Weights") -> "Weights":
        """The tensors of a folder; an opened folder is used as it is."""
        return source if isinstance(source, Weights) else Weights(source)

    @property
    def is_quantised(self) -> bool:
        """Whether weights are dequantised as they are read, from a GGUF file or from MXFP4."""
        files = set(self._files.values())
        quantised = (isinstance(file, GGUFFile) and file.is_quantised for file in files)
        return any(quantised) or any(isinstance(file, mxfp4.PackedStack) for file in files)

    def names(self) -> set[str]:
        """Names of the stored tensors; float8 scales belong to their tensor and are not listed."""
        return set(self._files) - set(self._scales.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """The stored number format, in safetensors' words (F32, BF16, I64, ...)."""
        return str(self._files[name].get_slice(name).get_dtype())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `tensor(name)`; reads no more than the file's header."""
        dtype: torch.dtype = self._files[name].get_slice(name)[:0].dtype
        return torch.float32 if name in self._scales else dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, as stored; float8 is dequantised to float32."""
        if name in self._scales and self._blocks is not None:
            return fp8.multiply_out(self._read(name), self._read(self._scales[name]), self._blocks)
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        try:
            stored: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"tensor {name!r} in {str(self.folder)!r} cannot be read ({error}); download the file again"
            ) from error
        return stored

    def check(self, plan: Plan, ignorable: Callable[[str], bool]) -> None:
        """Refuse the folder, naming every problem at once, unless its tensors are exactly those of the plan."""
        wanted = {piece.name: piece.shape for pieces in plan.values() for piece in pieces}
        stored = self.names()
        present = sorted(stored & set(wanted))
        shapes = {name: self.shape(name) for name in present}
        dtypes = {name: self.stored_dtype(name) for name in present}
        problems = {
            "missing": sorted(set(wanted) - stored),
            "unexpected": sorted(name for name in stored - set(wanted) if not ignorable(name)),
            "of the wrong shape": [
                f"{name} is {list(shapes[name])}, not {list(wanted[name])}"
                for name in present
                if shapes[name] != wanted[name]
            ],
            "not scaled in whole blocks": self._misscaled(present),
            "not float32, float16 or bfloat16": [
                f"{name} is {dtypes[name]}"
                for name in present
                if dtypes[name] not in _FLOATS and name not in self._scales
            ],
        }
        found = [f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names]
        if found:
            raise CheckpointError(
                f"tensors in {str(self.folder)!r} do not fit its config.json: {'; '.join(found)}; "
                "use the files the config belongs to"
            )

    def _misscaled(self, names: list[str]) -> list[str]:
        """Messages about float8 tensors whose scales do not fit them."""
        found = []
        for name in names:
            if name not in self._scales or self._blocks is None:
                continue
            shape, scales = self.shape(name), self.shape(self._scales[name])
            if self.stored_dtype(name) != fp8.DTYPE:
                found.append(f"{name} has scales, but is {self.stored_dtype(name)}")
            elif len(shape) != 2 or scales != fp8.scale_shape(shape, self._blocks):
                found.append(f"{self._scales[name]} is {list(scales)} for blocks of {list(self._blocks)}")
        return found

    def float8_size(self, plan: Plan) -> int:
        """How many of the plan's weights are stored in float8 (one byte each)."""
        names = {piece.name for pieces in plan.values() for piece in pieces if piece.name in self._scales}
        return sum(math.prod(self.shape(name)) for name in names)

    def fill(self, module: nn.Module, plan: Plan, held: torch.dtype | None = None) -> None:
        """Copy the plan's tensors into the module's parameters, rounded to `held`, cast and moved one at a time."""
        with torch.no_grad():
            for name, pieces in plan.items():
                parameter, start, end = module.get_parameter(name), 0, 0
                owner = module.get_submodule(name.rpartition(".")[0])
                shard = owner.shard if isinstance(owner, Packable) else None
                for piece in pieces:
                    stored = self.tensor(piece.name)
                    taken = stored if piece.take is None else piece.take(stored)
                    rows = [(0, len(taken))] if shard is None else shard.within(start, start + len(taken))
                    for low, high in rows:
                        own = taken[low:high]
                        parameter[end : end + high - low].copy_(own if held is None else own.to(held))
                        end += high - low
                    start += len(taken)

    def fill_and_pack(
        self, module: nn.Module, plan: Plan, shared: Iterable[Linear] = (), held: torch.dtype | None = None
    ) -> None:
        """`fill` and pack each linear as soon as its weight is complete, so that only one weight is there twice."""
        kept = list(shared)
        module.requires_grad_(False)
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            names = [prefix + name for name, _ in part.named_parameters(recurse=False)]
            self.fill(module, {name: plan[name] for name in names if name in plan}, held)
            if isinstance(part, Packable) and part.packed is None:
                part.pack(keep_weight=any(part is other for other in kept), held=held)
        cache_attributes(module)


def listed(names: list[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: a GGUF file itself, those of the index, or the only safetensors file."""
    if folder.is_file():
        return [folder]
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(
            f"{len(files)} safetensors files in {str(folder)!r} and no {INDEX}; add the index that joins them"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"the weights in {str(folder)!r} are pickles ({listed(pickles)}), which can run code and are "
            "never opened; convert them where you trust them: "
            'safetensors.torch.save_file(torch.load(FILE, weights_only=True), "model.safetensors")'
        )
    raise CheckpointError(f"no safetensors weights in {str(folder)!r}; download model.safetensors or its shards")


def _indexed_files(folder: Path) -> list[Path]:
    index = read_object(folder / INDEX)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{str(folder / INDEX)!r} has no weight_map of file names; download it again")
    shards = sorted(set(table.values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{INDEX} in {str(folder)!r} names files outside the folder: {listed(outside)}; use plain file names"
        )
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{INDEX} in {str(folder)!r} names files that are not there: {listed(absent)}; download them"
        )
    return [folder / name for name in shards]


def _open(path: Path) -> Any:
    check_regular(path)
    if is_gguf(path):
        return GGUFFile(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(path)!r} is not a whole safetensors file ({error}); download it again") from error
