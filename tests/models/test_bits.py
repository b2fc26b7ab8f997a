"""A token's hidden state has the same bits however the text is cut into windows, in any batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peregrine.attention import AttentionBackend, AttentionMetadata, Window
from peregrine.attention.routing import BACKENDS
from peregrine.cache.store import KVStore
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.decoder import Decoder
from peregrine.models.families import parse_config
from peregrine.models.layers import draw_weights

LENGTH, PAGE_SIZE, PAGES = 23, 4, 7
FIELDS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEEPSEEK_FIELDS: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-window": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "deepseek-v2": DEEPSEEK_FIELDS | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None},
    "deepseek-v3": DEEPSEEK_FIELDS
    | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
}
backends = pytest.mark.parametrize(
    "backend", [pytest.param(b, id=b.name) for b in BACKENDS if not b.missing() and b.name != "triton"]
)


@pytest.fixture(params=list(MODELS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    config = parse_config(Fields("config.json", FIELDS | MODELS[request.param]))
    decoder = Decoder(config, num_positions=LENGTH)
    draw_weights(decoder, torch.Generator().manual_seed(2), scale=0.2)
    return decoder.pack()


def tokens_of(row: int) -> Tensor:
    return torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(row))


def read(
    decoder: Decoder, backend: AttentionBackend, rows: int, lengths: Sequence[int], live_only: bool = False
) -> Tensor:
    """Hidden states of row 0 of `rows` equally long texts, read in windows. [LENGTH, H]"""
    config = decoder.config
    store = KVStore(config.num_layers, 1 + rows * PAGES, PAGE_SIZE, config.kv_shape, torch.float32, "cpu")
    table = 1 + torch.arange(rows * PAGES).view(rows, PAGES)
    text = torch.stack([tokens_of(row) for row in range(rows)])
    start, hidden = 0, []
    for length in lengths:
        positions = torch.arange(start, start + length).repeat(rows)
        places = positions.view(rows, length)
        metadata = AttentionMetadata(
            window=Window.uniform(rows, length),
            positions=positions,
            q_starts=torch.arange(rows + 1) * length,
            past_lens=torch.full((rows,), start),
            page_table=table,
            page_size=PAGE_SIZE,
            slots=(table.gather(1, places // PAGE_SIZE) * PAGE_SIZE + places % PAGE_SIZE).flatten(),
            ancestors=None,
        )
        tokens = text[:, start : start + length].flatten()
        if live_only:
            hidden.append(read_live(decoder, backend, store, tokens, metadata)[:1])
        else:
            attend = backend.bind(store, decoder.layer_attention(), metadata)
            hidden.append(decoder(tokens, positions, attend)[0][:length])
        start += length
    return torch.cat(hidden)


def read_live(
    decoder: Decoder, backend: AttentionBackend, store: KVStore, tokens: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Hidden states of a window where only each row's last token is live in the last layer. [R, H]"""
    live = metadata.q_starts[1:] - 1
    rows, last = metadata.window.num_rows, decoder.config.num_layers - 1
    ends = metadata.positions[live]
    narrow = replace(
        metadata, window=Window.uniform(rows, 1), positions=ends, q_starts=torch.arange(rows + 1), past_lens=ends
    )
    body, tail = (backend.bind(store, decoder.layer_attention(), m) for m in (metadata, narrow))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: object = None) -> Tensor:
        return (tail if layer == last else body)(layer, q, k, v)

    hidden: Tensor = decoder(tokens, metadata.positions, attend, (), live)[0]
    return hidden


@torch.no_grad()
@backends
def test_windows_and_other_rows_change_no_bit(decoder: Decoder, backend: AttentionBackend) -> None:
    whole = read(decoder, backend, 1, [LENGTH])
    logits = decoder.logits(whole)
    for rows, lengths in ((1, [1] * LENGTH), (1, [9, 1, 5, 5, 3]), (3, [LENGTH]), (4, [6, 2, 1, 1, 13])):
        other = read(decoder, backend, rows, lengths)
        assert torch.equal(other, whole), (rows, lengths)
        assert torch.equal(decoder.logits(other[:3]), logits[:3])


@torch.no_grad()
@backends
def test_a_live_row_has_the_bits_of_the_full_window(decoder: Decoder, backend: AttentionBackend) -> None:
    whole = read(decoder, backend, 1, [LENGTH])
    lengths = [9, 1, 5, 8]
    live = read(decoder, backend, 3, lengths, live_only=True)
    assert torch.equal(live, whole[torch.tensor(lengths).cumsum(0) - 1])
