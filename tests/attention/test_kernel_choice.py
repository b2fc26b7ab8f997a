"""The kernel is chosen by the window's shape, and by measured times where two could serve."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peregrine.attention import Kernel, KernelCosts, Window, choose_launch
from peregrine.attention.kernel_choice import kernel_reason, measure_costs, only, usual_problem
from peregrine.attention.triton_backend import ON_CUDA
from peregrine.kernels.attention import Gpu, Problem, context_launch, decode_launch

TRAITS = replace(ON_CUDA, max_decode_q_len=16)
NO_DECODE = replace(ON_CUDA, max_decode_q_len=0)
H200 = Gpu(is_cuda=True, is_hopper=True, num_sms=132, compiles_cuda=True)
A100 = Gpu(is_cuda=True, is_hopper=False, num_sms=108, compiles_cuda=False)


def problem(window: Window) -> Problem:
    return usual_problem(window, 128, 16, torch.bfloat16)


@pytest.mark.parametrize(
    ("window", "kernel"),
    [
        (Window.ragged([70, 3]), Kernel.CONTEXT),  # prefill
        (Window.ragged([7, 3]), Kernel.DECODE),  # planned windows
        (Window.uniform(4, 5), Kernel.DECODE),  # verify, and the drafter rereading it
        (Window.uniform(4, 1), Kernel.DECODE),  # one draft step, or plain decoding
        (Window.uniform(4, 16), Kernel.DECODE),
        (Window.uniform(4, 17), Kernel.CONTEXT),
        (Window.ragged([5, 5]), Kernel.DECODE),  # prompts of one length are uniform, too
        (Window.uniform(1, 4096), Kernel.CONTEXT),  # a long prompt alone is uniform, too
    ],
)
def test_kernel_follows_shape(window: Window, kernel: Kernel) -> None:
    assert choose_launch(problem(window), TRAITS, H200).kernel is kernel


def test_a_backend_without_a_decode_kernel_uses_the_context_kernel() -> None:
    one = problem(Window.uniform(1, 1))
    assert choose_launch(one, NO_DECODE, H200).kernel is Kernel.CONTEXT
    assert kernel_reason(one, NO_DECODE, H200) == "1 x 1: context, the only kernel there is"


def test_with_many_rows_one_kernel_is_left_on_hopper() -> None:
    """Tiles fill the device without split-KV, which would only add a merge."""
    many = problem(Window.uniform(32, 4))
    assert choose_launch(many, ON_CUDA, A100) == context_launch(many, A100)
    assert kernel_reason(many, ON_CUDA, A100) == "32 x 4: context, tiles of queries alone fill the device"
    assert choose_launch(many, ON_CUDA, H200).on_hopper


@pytest.mark.parametrize(
    ("change", "on_hopper"),
    [
        ({}, True),
        ({"page_size": 64, "key_dim": 64, "value_dim": 64}, True),
        ({"num_tokens": 31, "max_q_len": 31, "q_len": 31}, False),  # less than a tile of 128 query rows
        ({"key_dim": 96, "value_dim": 96}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"has_window": True}, False),
        ({"has_sinks": True}, False),
        ({"is_tree": True}, False),
    ],
)
def test_long_windows_have_a_kernel_of_their_own_on_hopper(change: dict[str, object], on_hopper: bool) -> None:
    prompt = replace(problem(Window.uniform(1, 4096)), **change)  # type: ignore[arg-type]
    assert choose_launch(prompt, NO_DECODE, H200) == context_launch(prompt, H200)
    assert context_launch(prompt, H200).on_hopper is on_hopper
    assert not context_launch(prompt, A100).on_hopper


def test_the_faster_kernel_is_taken_for_the_shape_that_was_measured() -> None:
    costs = KernelCosts({(1, 4): (0.5, 0.25), (8, 4): (0.25, 0.5)})
    taken = [choose_launch(problem(Window.uniform(rows, 4)), TRAITS, H200, costs).kernel for rows in (1, 8, 2)]
    assert taken == [Kernel.CONTEXT, Kernel.DECODE, Kernel.DECODE]  # the last was not measured


def test_both_kernels_are_timed_for_each_shape() -> None:
    times = {Kernel.DECODE: 1.0, Kernel.CONTEXT: 2.0}
    costs = measure_costs([(1, 1), (4, 4)], lambda kernel, shape: times[kernel] * shape[0])
    assert costs == KernelCosts({(1, 1): (1.0, 2.0), (4, 4): (4.0, 8.0)})


lengths = st.lists(st.integers(1, 80), min_size=1, max_size=6)
windows = st.one_of(lengths.map(Window.ragged), st.builds(Window.uniform, st.integers(1, 40), st.integers(1, 200)))
times = st.floats(0, 10)


@given(windows, st.integers(0, 64), times, times, st.sampled_from([H200, A100]))
def test_the_chosen_kernel_takes_the_window(
    window: Window, max_q_len: int, decode_ms: float, context_ms: float, gpu: Gpu
) -> None:
    traits = replace(ON_CUDA, max_decode_q_len=max_q_len)
    shape = (window.num_rows, window.q_len or 0)
    for costs in (KernelCosts({}), KernelCosts({shape: (decode_ms, context_ms)}), *(only(k, [shape]) for k in Kernel)):
        launch = choose_launch(problem(window), traits, gpu, costs)
        assert launch in (decode_launch(problem(window), gpu, max_q_len), context_launch(problem(window), gpu))
        assert launch.kernel is Kernel.CONTEXT or (window.q_len is not None and window.q_len <= max_q_len)
        assert f": {launch.kernel.value}, " in kernel_reason(problem(window), traits, gpu, costs)


@given(st.integers(1, 64), st.sampled_from(Kernel))
def test_only_forces_a_kernel_where_both_may_serve(q_len: int, kernel: Kernel) -> None:
    window = problem(Window.uniform(3, q_len))
    launch = choose_launch(window, ON_CUDA, H200, only(kernel, [(3, q_len)]))
    assert launch.kernel is (Kernel.CONTEXT if decode_launch(window, H200, 64) is None else kernel)


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (Window.ragged([7, 3]), "2 x up to 7: decode, rows differ in length"),
        (Window.uniform(2, 17), "2 x 17: context, decode takes at most 16 queries a row"),
        (Window.uniform(2, 3), "2 x 3: decode, measured when an engine starts"),
        (Window.uniform(1, 4), "1 x 4: context, decode took 0.5000 ms and context 0.2500 ms"),
    ],
)
def test_reasons_are_readable(window: Window, reason: str) -> None:
    assert kernel_reason(problem(window), TRAITS, H200, KernelCosts({(1, 4): (0.5, 0.25)})) == reason
