"""Other engines that `bench offline` measures beside this one: llama.cpp for a GGUF file, transformers for a folder."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from peregrine.errors import need_packages
from peregrine.models.checkpoint.gguf.header import is_gguf

LONGEST_PROMPT = 256  # tokens that llama.cpp has room for beside those it writes


class Peer(Protocol):
    """Another engine with the same model."""

    name: str

    def write(self, prompts: list[list[int]], tokens: int) -> None:
        """Continue every prompt greedily by exactly this many tokens."""


def open_peer(model: str, rows: int, tokens: int) -> Peer:
    """The engine to compare with, for at most this many requests at a time and tokens each."""
    return LlamaCpp(Path(model), rows, tokens) if is_gguf(model) else Transformers(model)


class Transformers:
    """transformers' generate, in float32. Prompts are cut to one length, so that none is padded."""

    name = "transformers"

    def __init__(self, folder: str) -> None:
        need_packages("transformers", instead=", or pass --no-peer")
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], tokens: int) -> None:
        shortest = min(len(prompt) for prompt in prompts)
        batch = torch.tensor([prompt[:shortest] for prompt in prompts])
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        self.model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=False, pad_token_id=0, **limits)


class LlamaCpp:
    """llama.cpp on the same file and with as many threads, through the server that xllamacpp runs in this process."""

    name = "llama.cpp"

    def __init__(self, path: Path, rows: int, tokens: int) -> None:
        need_packages("xllamacpp", instead=", or pass --no-peer")
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.verbosity = str(path), 0
        params.n_parallel, params.n_ctx = rows, rows * (tokens + LONGEST_PROMPT)
        for cores in (params.cpuparams, params.cpuparams_batch):
            cores.n_threads = torch.get_num_threads()
        self.server = xllamacpp.Server(params)

    def write(self, prompts: list[list[int]], tokens: int) -> None:
        limits = {"n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}

        def complete(prompt: list[int]) -> None:
            body = json.dumps({"prompt": prompt, **limits}).encode()
            address = f"{self.server.listening_address}/completion"
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as response:
                written = json.load(response)["tokens_predicted"]
            assert written == tokens, f"llama.cpp wrote {written} tokens instead of {tokens}"

        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(complete, prompts))
