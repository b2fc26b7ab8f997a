"""The Triton backend takes the kernel the costs say, and keeps the counters of each store apart."""

import pytest
import torch

from peregrine.attention import Kernel, LayerAttention
from peregrine.attention.conformance.paging import attend
from peregrine.attention.conformance.problem import chain
from peregrine.attention.kernel_choice import only
from peregrine.attention.triton_backend import INTERPRETED, ON_CUDA, TritonBackend
from peregrine.hardware import triton_interprets
from peregrine.kernels.gpu import TRITON_PRESENT

needs_interpreter = pytest.mark.skipif(
    not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter"
)
LAYER = LayerAttention(0.2, None, None)
HEADS = (4, 1, 16)


def test_traits_say_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TritonBackend().traits is ON_CUDA
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().traits is INTERPRETED
    assert not INTERPRETED.automatic
    assert torch.bfloat16 not in INTERPRETED.dtypes


@needs_interpreter
@pytest.mark.parametrize("kernel", Kernel)
def test_the_kernel_that_costs_less_is_launched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from peregrine.kernels import attention_plan_gpu as gpu

    launched = []
    right = gpu.launch

    def spy(what: object, *arguments: object, **options: object) -> None:
        launched.append(what)
        right(what, *arguments, **options)

    monkeypatch.setattr(gpu, "launch", spy)
    attend(TritonBackend(only(kernel, [(1, 2)])), [chain(140, 2, HEADS)], LAYER)
    decode, context = [gpu.decode_kernel, gpu.merge_kernel], [gpu.context_kernel]
    assert launched == [gpu.write_kernel, *(decode if kernel is Kernel.DECODE else context)]
