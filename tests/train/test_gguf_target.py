"""A head's prompts for a GGUF target are made with the tokenizer and the chat template of the file."""

from pathlib import Path

import pytest

from peregrine.engine.sources import FolderSource
from peregrine.train.make_head import prepare_prompts
from peregrine.train.options import HeadOrder, SamplingPlan

pytest.importorskip("gguf")
from models.gguf_files import tokenizer_fields, write_gguf


def test_prompts_are_ids_of_the_files_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", {}, {}, **tokenizer_fields())
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(f"the tin {i} in the inn" for i in range(40)))
    plan = SamplingPlan(tokens=40, max_tokens=8, prompt_tokens=64)
    order = HeadOrder(str(path), (tmp_path / "text.txt",), tmp_path / "head", plan, eval_prompts=4)
    order.stages.mkdir(parents=True)
    source = FolderSource(path)
    train, held_out = prepare_prompts(order, source)
    assert (len(train), len(held_out)) == (plan.num_prompts, 4)
    assert all("the tin" in source.tokenizer().decode(list(prompt.tokens)) for prompt in train)
    assert prepare_prompts(order, source) == (train, held_out)  # kept, not made again
