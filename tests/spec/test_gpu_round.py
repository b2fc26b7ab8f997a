"""The round on GPU kernels, on CPU tensors in Triton's interpreter: the same tokens, in few launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.exact_sampling import Params, sampling_of
from kernels.interpreted import needs_interpreter, send_to_triton
from peregrine.engine import rounds as engine_rounds
from peregrine.engine.engine import Engine
from peregrine.kernels.sampling.reference import Features, choose
from peregrine.sampling import SamplingParams
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.readers import HeadReader
from peregrine.spec.tree import TreeDrafter
from spec.harness import VOCAB, Case, build, cases, eagle3_head, noisy_model, run, tokens

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CHAIN: dict[str, object] = {"drafter": str(eagle3_head()), "num_drafts": 3}
TREE: dict[str, object] = {"drafter": str(eagle3_head()), "tree": (3, 2, 8)}
NGRAM: dict[str, object] = {"drafter": "ngram", "num_drafts": 4}
MODEL: dict[str, object] = {"drafter": str(noisy_model()), "num_drafts": 3}  # often right, as heads of noise never are
MODEL_TREE: dict[str, object] = {"drafter": str(noisy_model()), "tree": (3, 2, 8)}

# Operations that only describe or reserve memory.
FREE = {
    *("view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "t", "transpose"),
    *("permute", "as_strided", "alias", "detach", "split", "split_with_sizes", "unbind", "_reshape_alias"),
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
}


class Launches(TorchDispatchMode):
    """The names of all torch operations and Triton kernels that a device would be given, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.hidden = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.hidden:
            return func(*args, **(kwargs or {}))
        with self:  # `flatten` and the like are a view or a copy: count the operations they call
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def hide(self) -> Iterator[None]:
        self.hidden += 1
        try:
            yield
        finally:
            self.hidden -= 1

    def hiding(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its launches not counted."""

        def hidden(*arguments: Any, **options: Any) -> Any:
            with self.hide():
                return inner(*arguments, **options)

        return hidden

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.names.append(kernel.fn.__name__)
        with self.hide():  # the interpreter copies tensors
            kernel[grid](*arguments, **options)


def count_kernels(patch: pytest.MonkeyPatch, launches: Launches) -> None:
    from peregrine.kernels.round import drafts_triton, ngram_triton, places_triton, tree_triton, verdict_triton
    from peregrine.kernels.sampling import adjust_triton as adjust_gpu
    from peregrine.kernels.sampling import digits_triton, histogram_triton
    from peregrine.kernels.sampling import logprobs_triton as logprobs_gpu
    from peregrine.kernels.sampling import scores_triton as scores_gpu
    from peregrine.kernels.sampling import triton as choose_gpu
    from peregrine.synthetic import accept_triton as simulated

    rounds = (drafts_triton, ngram_triton, places_triton, tree_triton, verdict_triton)
    filters = (histogram_triton, digits_triton)
    for module in (choose_gpu, adjust_gpu, scores_gpu, *filters, logprobs_gpu, *rounds, simulated):
        patch.setattr(module, "launch", launches.launch)
    # The target's vocabulary of 300 takes several spans and the head's of 200 one; with noise both take several.
    for name, size in {"WHOLE": 256, "SPAN": 256, "NOISY_SPAN": 128}.items():
        patch.setattr(choose_gpu, name, size)


def hide_models(engine: Engine, patch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Do not count launches of the models' forwards."""
    target, drafter = engine.runner.target, engine.runner.drafter
    networks: list[Any] = [target.decoder]
    if isinstance(drafter, ChainDrafter | TreeDrafter):
        reader = drafter.reader
        networks.append(reader.head if isinstance(reader, HeadReader) else reader.model.decoder)
    for network in networks:
        for method in ("forward", "fuse", "logits"):
            if method in dir(network):
                patch.setattr(network, method, launches.hiding(object.__getattribute__(network, method)))
    patch.setattr(type(target.backend), "bind", launches.hiding(type(target.backend).bind))


def launches_of_a_round(
    options: dict[str, object], sampling: dict[str, object], patch: pytest.MonkeyPatch
) -> list[str]:
    """Launches of the third round outside the models: it has drafts and ends no request."""
    engine, launches, rounds = build(**options).engine, Launches(), []  # type: ignore[arg-type]
    send_to_triton(patch)
    patch.setattr("peregrine.spec.chain.numba_ready", lambda *tensors: False)  # steps are replayed on CPUs alone
    patch.setattr(engine.runner.rounds, "replayed", None)  # and so are rounds
    count_kernels(patch, launches)
    hide_models(engine, patch, launches)
    run_round = engine_rounds.run_round

    def counted(*arguments: Any) -> Any:
        launches.names.clear()
        with launches:
            result = run_round(*arguments)
        rounds.append(list(launches.names))
        if len(rounds) == 3:
            raise InterruptedError
        return result

    patch.setattr(engine_rounds, "run_round", counted)
    with pytest.raises(InterruptedError):
        run(engine, [Case(tuple(range(1, 20)), SamplingParams(max_tokens=8, **sampling))])  # type: ignore[arg-type]
    return rounds[2]


GREEDY: dict[str, object] = {"temperature": 0.0}
SAMPLED: dict[str, object] = {"temperature": 1.0, "seed": 1}


@pytest.mark.parametrize(
    ("options", "sampling", "most"),
    [
        ({}, GREEDY, 4),
        ({}, SAMPLED, 4),
        (CHAIN, GREEDY, 10),  # window, choose 2, commit, path, ahead, pick 3, keep
        (CHAIN, SAMPLED, 13),  # each pick is 2
        (MODEL, GREEDY, 13),
        (NGRAM, GREEDY, 6),
        (TREE, GREEDY, 18),
        (TREE, SAMPLED, 18),
        ({**CHAIN, "simulate_accept": 3.0}, GREEDY, 11),
    ],
    ids=["plain", "plain, sampled", "chain", "chain, sampled", "model", "ngram", "tree", "tree, sampled", "simulated"],
)
def test_a_round_is_few_launches(
    options: dict[str, object], sampling: dict[str, object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = launches_of_a_round(options, sampling, monkeypatch)
    assert len(names) <= most, ", ".join(names)


@pytest.mark.parametrize(
    ("features", "most"),
    [(Features(), 2), (Features(sampled=True), 2), (Features(sampled=True, filtered=True), 5)],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_choice_from_half_precision_is_few_launches(
    features: Features, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, sampling = Launches(), sampling_of([Params(temperature=0.8, top_k=20, top_p=0.9)])
    send_to_triton(monkeypatch)
    count_kernels(monkeypatch, launches)
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(2)[None]
    with torch.inference_mode(), launches:
        choose(logits, positions, sampling, features, None)
    assert len(launches.names) <= most, ", ".join(launches.names)


@pytest.mark.parametrize(
    ("options", "every"),
    [(CHAIN, 1), (TREE, 3), (NGRAM, 3), (MODEL, 3), (MODEL_TREE, 3)],
    ids=["chain", "tree", "ngram", "model", "a model's tree"],
)
def test_speculation_changes_no_token(options: dict[str, object], every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of a head under all sampling parameters; other drafters share those kernels."""
    some = cases(10, max_tokens=4, seed=7)[::every]
    expected = tokens(run(build().engine, some))
    engine = build(**options).engine  # type: ignore[arg-type]
    send_to_triton(monkeypatch)
    with torch.inference_mode():
        assert tokens(run(engine, some)) == expected
