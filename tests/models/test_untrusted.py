"""Checkpoint files from strangers: each bad one is refused in one line, at once, before memory is taken."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peregrine.engine.folders import find_model
from peregrine.errors import CheckpointError, RequestError
from peregrine.text.chat import encode_chat
from peregrine.text.tokenizer import Tokenizer
from spec.harness import build, eagle3_head, tiny_model

SOON_S = 20  # far more than a refusal takes, so that a hang fails here and not at the end of the run
ROOM_BYTES = 4 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@contextmanager
def bounded() -> Iterator[None]:
    """A hang inside ends with an error, and so does taking gigabytes."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not refused within {SOON_S} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SOON_S)
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def refusal(folder: Path, **options: object) -> str:
    with bounded(), pytest.raises(CheckpointError) as caught:
        build(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eos_token_id": [2, 300]}, "eos_token_id=[2, 300]: ids run from 0 to 299; name tokens of the vocabulary"),
        ({"eos_token_id": list(range(17))}, "17 ids are more than 16; name fewer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: is above 1024"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000: is above"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000: is above 16777216"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000: is above"),
        ({"vocab_size": 2**23}, "of the wrong shape"),
        ({"hidden_size": 10**30}, "hidden_size=1000000000000000000000000000000: is above"),
        ({"num_attention_heads": 2**30, "head_dim": 2**30}, "do not fit its config.json"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: not a number above 0 that float32 can hold"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: not a number above 0 that float32 can hold"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=10000"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: not a number above 0 that float32 can hold"),
        ({"rope_theta": 1.0}, "rope_theta=1.0: not above 1"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}},
            "factor=inf: not a number above 0 that float32 can hold",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e9}}, "stretches the context to 768000000000 positions"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2**30, "num_experts_per_tok": 2},
            "1073741824 experts in 4 layers are more than",
        ),
    ],
)
def test_a_config_with_absurd_values_is_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    edit(folder / "config.json", **changes)
    (folder / "generation_config.json").unlink()
    assert says in refusal(folder)


def test_eos_ids_of_the_generation_config_are_checked_too(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=2**40)
    assert "generation_config.json: eos_token_id=1099511627776" in refusal(folder)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_text('{"a":' * 100 + "1" + "}" * 100)


def deeper(path: Path) -> None:
    path.write_text("[" * 10**6)


def latin(path: Path) -> None:
    path.write_bytes('{"a": "café"}'.encode("latin-1"))


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte without a block on the disk


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
BAD_FILES: dict[Callable[[Path], None], str] = {
    fifo: "is not a regular file",
    endless: "is not a regular file",
    deep: "nests lists and objects more than 64 deep",
    deeper: "nests lists and objects more than 64 deep",
    latin: "is not UTF-8 text",
    large: "is larger than the",
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_a_file_that_is_no_small_json_file_is_refused(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    message = refusal(folder)
    assert name in message
    assert BAD_FILES[make] in message


@pytest.mark.parametrize(
    ("name", "make"),
    [("model.safetensors", fifo), ("model.safetensors", endless), ("model.safetensors.index.json", fifo)],
)
def test_weights_are_regular_files(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert f"{name} is not a regular file" in refusal(folder)


@pytest.mark.parametrize("make", [fifo, latin, large], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_templates/default.jinja"])
def test_templates_are_small_text_files(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    make(folder / name)
    assert BAD_FILES[make] in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"one": {"content": "x"}},
        {"-1": {"content": "x"}},
        {"9" * 5000: {"content": "x"}},
        {"1": 7},
        {"1": {}},
        {"1": {"content": 5}},
        {"1": {"content": "x", "special": "yes"}},
        {"1": None},
    ],
)
def test_junk_among_added_tokens_is_refused(folder: Path, entry: dict[str, Any]) -> None:
    edit(folder / "tokenizer_config.json", added_tokens_decoder=entry)
    assert "tokenizer_config.json: added_tokens_decoder holds" in refusal(folder)


def test_half_of_an_escaped_pair_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token="\ud800")
    assert "tokenizer_config.json is not valid JSON" in refusal(folder)


def test_what_the_tokenizer_fails_on_is_refused(folder: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
    (folder / "tokenizer_config.json").unlink()
    edit(folder / "tokenizer.json", model=model, added_tokens=[], pre_tokenizer=None, post_processor=None)
    with pytest.raises(RequestError, match="text='b': the model's tokenizer fails on it"):
        Tokenizer.read(folder).encode("b")


def test_a_template_that_nests_too_deeply_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{" + "(" * 10**5 + "1" + ")" * 10**5 + "}}")
    with pytest.raises(CheckpointError, match="nests too deeply"):
        encode_chat(Tokenizer.read(folder), [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        find_model(name)


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_a_draft_heads_files_are_read_alike(tmp_path: Path, make: Callable[[Path], None]) -> None:
    head = Path(shutil.copytree(eagle3_head(), tmp_path / "head"))
    (head / "config.json").unlink()
    make(head / "config.json")
    assert BAD_FILES[make] in refusal(tiny_model(), drafter=str(head))


def test_a_long_context_takes_its_memory_when_it_is_asked_for(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=2**24)
    built = build(folder)
    assert built.engine.runner.seats.max_len == 2**20  # its pages hold less
    assert "the context is 1048576" in next(d.because for d in built.decisions if d.field == "max_len")
    assert build(folder, max_len=64).engine.runner.target.decoder.rope_table.shape[0] < 256


def test_a_draft_model_reads_every_position_of_its_target(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_model(), tmp_path / "draft"))
    edit(draft / "config.json", max_position_embeddings=16)
    built = build(drafter=str(draft))
    network = built.engine.runner.drafter.reader.model.decoder  # type: ignore[attr-defined]
    assert network.rope_table.shape == built.engine.runner.target.decoder.rope_table.shape
