"""How many pages fit into memory, and errors that say what did not fit."""

import pytest
import torch

from peregrine import hardware
from peregrine.cache.store import KVShape
from peregrine.config import EngineConfig
from peregrine.engine import memory
from peregrine.engine.memory import explain_memory, make_stores, mask_bytes, page_bytes, pick_num_pages, scratch_bytes
from peregrine.errors import ConfigError
from peregrine.hardware import Gpu, check_room
from peregrine.spec.registry import StoreShape
from peregrine.spec.state import SeatState
from peregrine.spec.types import DraftShape
from peregrine.synthetic.shapes import shape_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# 128 and 24 numbers a token, keys as many as values.
SHAPES = [StoreShape(4, KVShape.of_heads(2, 16)), StoreShape(1, KVShape.of_heads(3, 8))]
GIB = 2**30


@pytest.fixture
def full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 GiB: 90 used by this process, 3 free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 90 * GIB)


@pytest.mark.usefixtures("full_device")
def test_running_out_of_memory_says_for_what_how_much_was_free_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as raised, explain_memory(CUDA, "the weights", "choose a smaller model"):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")
    assert str(raised.value) == (
        "cuda:0 has no room for the weights: 3.0 of 100.0 GiB are free and 90.0 GiB hold what was loaded before; "
        "choose a smaller model (tried to allocate 5 GiB)"
    )
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), explain_memory(CUDA, "anything", "nothing"):
        raise ZeroDivisionError


@pytest.mark.usefixtures("full_device")
def test_stores_that_do_not_fit_name_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(memory, "KVStore", full)
    with pytest.raises(ConfigError, match=r"num_pages=1000000, 18\.1 GiB of keys and values.*lower num_pages"):
        make_stores(SHAPES, 1_000_000, 32, torch.bfloat16, CUDA)


def test_a_page_is_keys_and_values_of_all_layers_of_all_stores() -> None:
    assert page_bytes(SHAPES, 16, torch.bfloat16) == 16 * 2 * (2 * 128 + 2 * 24)
    assert page_bytes(SHAPES, 16, torch.float8_e4m3fn) == 16 * (2 * 128 + 2 * 24)


def test_stores_hold_what_a_page_counts() -> None:
    stores = make_stores(SHAPES, 7, 16, torch.float32, CPU)
    assert sum(store.num_bytes for store in stores) == 7 * page_bytes(SHAPES, 16, torch.float32)
    assert [store.num_pages for store in stores] == [7, 7]


def pick(free: int | None, device: torch.device, patch: pytest.MonkeyPatch, **asked: object) -> tuple[int, str]:
    """The number of pages chosen with `free` bytes unused, for 4 requests of 100 tokens on pages of 16."""
    patch.setattr(hardware, "read_memory", lambda: (None, free))
    patch.setattr(hardware, "read_gpu", lambda index: Gpu(index, "a GPU", (9, 0), 0, free or 0))
    config = EngineConfig(**{"max_rows": 4, "page_size": 16, **asked})  # type: ignore[arg-type]
    return pick_num_pages(config, SHAPES, 100, device, torch.bfloat16)


def test_pages_suffice_for_every_request_and_the_scratch_page(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = (1 + 4 * (7 + 8), "4 requests of 100 tokens")  # 100 tokens are 7 pages; 8 are for rounds in flight
    for device in (CPU, CUDA):
        assert pick(100 * GIB, device, monkeypatch) == enough
    assert pick(None, CPU, monkeypatch) == enough  # free memory is unknown


def test_small_pages_are_as_many_as_a_window_past_the_end_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine would choose too few pages for the context, and cut it."""
    assert pick(None, CPU, monkeypatch, page_size=1)[0] == 1 + 4 * (100 + 128)


def test_pages_take_their_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 40 * page_bytes(SHAPES, 16, torch.bfloat16)
    assert pick(free, CPU, monkeypatch) == (10, "25% of the free memory")
    assert pick(free, CUDA, monkeypatch) == (34, "85% of the free memory")


def test_an_explicit_number_of_pages_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick(0, CUDA, monkeypatch, num_pages=9999) == (9999, "asked for")


def test_no_room_for_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_pages: 25% of the free memory holds 0 pages of 9728 bytes"):
        pick(5000, CPU, monkeypatch)


def test_scratch_is_set_aside_before_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    size = page_bytes(SHAPES, 16, torch.bfloat16)
    monkeypatch.setattr(hardware, "read_gpu", lambda index: Gpu(index, "a GPU", (9, 0), 0, 60 * size))
    config = EngineConfig(max_rows=4, page_size=16)
    chosen = pick_num_pages(config, SHAPES, 100, CUDA, torch.bfloat16, scratch=20 * size)
    assert chosen == (34, "85% of the free memory beside 0.0 GiB that rounds and prompts work in")
    with pytest.raises(ConfigError, match="holds 0 pages"):
        pick_num_pages(config, SHAPES, 100, CUDA, torch.bfloat16, scratch=70 * size)


def test_masks_of_grammars_are_counted() -> None:
    config = shape_config("shape:llama-3.2-1b")
    for drafter, drafts in (("none", 0), ("suffix", 3)):
        state = SeatState(5, DraftShape.chain(drafts, lookahead=0), 100, 16, CPU)
        state.hold_masks(config.vocab_size)
        assert state.masks is not None
        assert state.forced is not None
        held = sum(x.numel() * x.element_size() for x in (state.masks.rows, state.masks.words, state.forced))
        assert mask_bytes(EngineConfig(num_drafts=3, max_rows=5), drafter, config)[0] == held


def test_scratch_counts_mla_and_experts() -> None:
    """DeepSeek-V3: the scratch memory of a chunk and of a round, counted by hand."""
    config, bf16 = shape_config("shape:deepseek-v3"), torch.bfloat16
    asked = EngineConfig(prefill_chunk=4096, max_rows=1, num_drafts=3)
    attention = 128 * (2 * (192 + 576 + 512 + 128) + 4 * 512)  # of one token
    splits = 8 * (4096 // 128) * 64 * 2048  # 4 queries of 128 heads are 8 tiles
    unfilled = 257 * 128 * (2048 + 7168) * 2  # a block of each expert
    assert scratch_bytes(asked, config, 4096, bf16) == 4096 * (4 * 7168 * 2 + attention) + splits + unfilled
    qwen = shape_config("shape:qwen3-30b-a3b")
    answers = 8 * (768 + 2048) * 2 + 128 * 4
    unfilled = 128 * 128 * (768 + 2048) * 2
    assert scratch_bytes(asked, qwen, 4096, bf16) == 4096 * (4 * 2048 * 2 + answers) + unfilled


def test_a_model_that_cannot_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_memory", lambda: (None, 3 * GIB))
    check_room(CPU, "the weights", 2 * GIB)
    with pytest.raises(ConfigError, match=r"cpu has no room for the weights: 5\.0 GiB are needed and 3\.0 GiB"):
        check_room(CPU, "the weights", 5 * GIB)
    monkeypatch.setattr(hardware, "read_memory", lambda: (None, None))
    check_room(CPU, "the weights", 5 * GIB)  # free memory is unknown


def test_pages_that_cannot_fit_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peregrine.hardware.read_memory", lambda: (8 * GIB, 3 * GIB))
    with pytest.raises(ConfigError, match=r"cpu has no room for num_pages=1000000000, .* ask for less"):
        make_stores(SHAPES, 10**9, 16, torch.float32, CPU)
