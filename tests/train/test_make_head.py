"""`peregrine train head` on a toy model: it learns, resumes exactly, and refuses impossible settings."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peregrine.cli.main import main
from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.models.draft_heads import Eagle3Head
from peregrine.models.loading import load_decoder
from peregrine.sampling import SamplingParams
from peregrine.train import head_run
from peregrine.train.block import fresh_block_head
from peregrine.train.head import fresh_head
from peregrine.train.head_run import HeadRun
from peregrine.train.make_head import copy_weights, new_head
from peregrine.train.merlin.pretrain import PretrainOptions
from peregrine.train.merlin.recipe import MerlinOrder, Shape, make_merlin, make_target
from peregrine.train.options import DFLASH, STAGES_FOLDER, HeadOptions, HeadOrder
from peregrine.train.rows import Rows
from peregrine.train.run import load_state
from peregrine.train.samples import Samples
from spec.harness import tiny_model

SHAPE = Shape(
    vocab_size=320,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=128,
)
TARGET = PretrainOptions(
    row_len=64, batch_rows=8, steps=150, rate=1e-2, warmup_steps=5, eval_every=150, save_every=150, epoch_tokens=20_000
)
NAMES = ("Tom", "Lily", "Max", "Anna", "Ben", "Mia", "Sam", "Zoe")
THINGS = ("red ball", "green kite", "small boat", "old hat", "big drum", "blue cup")
SMALL = ["--max-tokens", "40", "--prompt-tokens", "24", "--rows", "16", "--batch", "4", "--seed", "3"]
SMALL += ["--eval-prompts", "8", "--eval-tokens", "32", "--device", "cpu"]


def story(name: str, thing: str, number: int) -> str:
    return (
        f"{name} had a {thing}. One day {name} lost the {thing} in the park. "
        f"A friend found the {thing} and gave it back. {name} said thank you {number} times."
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text in `data` and a two-layer target trained on it in `model`."""
    folder = tmp_path_factory.mktemp("toy")
    texts = [story(name, thing, n) for name in NAMES for thing in THINGS for n in range(2, 18)]
    (folder / "data").mkdir()
    (folder / "data" / "stories.txt").write_text("\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n")
    make_target(MerlinOrder(folder / "data", folder / "model", folder / "work", TARGET, SHAPE, "cpu"))
    return folder


@pytest.fixture
def train(toy: Path, tmp_path: Path) -> Callable[..., int]:
    """The command on the toy, into a folder of the test's own; later flags win."""

    def run(*flags: str, data: Path | None = None, out: str = "head") -> int:
        paths = ["--target", str(toy / "model"), "--data", str(data or toy / "data" / "stories.txt")]
        return main(["train", "head", *paths, "--out", str(tmp_path / out), *SMALL, *flags])

    return run


def accept_length(entries: list[dict[str, object]], shape: str, temperature: float) -> float:
    [found] = [e for e in entries if (e["shape"], e["temperature"], e["source"]) == (shape, temperature, "all")]
    assert isinstance(found["accept_length"], float)
    return found["accept_length"]


def test_a_head_for_a_toy_is_accepted_far_more_often_than_an_untrained_one(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--tokens", "6000", "--steps", "120", "--rate", "0.01", "--draft-vocab", "200") == 0
    printed = capsys.readouterr().out
    assert "tokens to sample: 6,000" in printed
    assert "device memory:" in printed
    report = json.loads((tmp_path / "head" / "report.json").read_text())
    for temperature in (0.0, 1.0):
        untrained = accept_length(report["untrained"], "chain of 3", temperature)
        assert untrained < 1.5
        assert accept_length(report["acceptance"], "chain of 3", temperature) > 2.5
    assert accept_length(report["acceptance"], "chain of 5", 0.0) > 3.0
    assert accept_length(report["acceptance"], "tree 5, 4, 24", 1.0) > 2.5
    assert report["draft_vocab"] == 200
    assert len(report["training"][-1]["agreement"]) == 5
    assert report["training"][-1]["agreement"][4] > 0.6
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    assert {"fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "norm.weight", "d2t", "t2d"} <= names
    pytest.importorskip("matplotlib")
    for picture in ("losses.png", "acceptance.png"):
        assert (tmp_path / "head" / picture).read_bytes().startswith(b"\x89PNG")


def test_a_block_head_for_a_toy_learns_and_its_report_says_how_well(train: Callable[..., int], tmp_path: Path) -> None:
    flags = ("--kind", "dspark", "--unroll", "5", "--layers", "1", "--blocks", "16", "--markov-rank", "16")
    assert train("--tokens", "4000", "--steps", "90", "--rate", "0.01", "--eval-prompts", "4", *flags) == 0
    report = json.loads((tmp_path / "head" / "report.json").read_text())
    assert report["kind"] == "dspark"
    assert {entry["shape"] for entry in report["acceptance"]} == {"chain of 3", "chain of 5", "tree 5, 4, 24"}
    sure = report["calibration"]
    assert sum(entry["drafts"] for entry in sure) > 300
    assert sure[-1]["confidence"] > sure[0]["confidence"] + 0.2
    assert sure[-1]["agrees"] > sure[0]["agrees"] + 0.2
    assert accept_length(report["untrained"], "chain of 3", 0.0) < 1.5
    assert accept_length(report["acceptance"], "chain of 5", 0.0) > 1.8


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--tokens", "1500", "--rows", "8", "--steps", "8", "--save-every", "4", "--no-eval")
    assert train(*flags, out="whole") == 0
    save, saved = Samples.save, []
    loss = HeadRun.loss

    def killed_save(samples: Samples, path: Path) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(path)
        save(samples, path)

    def killed_loss(run: HeadRun, batch: Rows) -> object:
        if run.step == 6:
            raise KeyboardInterrupt
        return loss(run, batch)

    def killed_save_head(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Samples, "save", killed_save)
        assert train(*flags, out="parts") == 130
    with monkeypatch.context() as patch:
        patch.setattr(HeadRun, "loss", killed_loss)
        assert train(*flags, "--rows", "2", out="parts") == 130  # sampled on by a machine with room for fewer rows
    state = load_state(tmp_path / "parts" / STAGES_FOLDER / "run")
    assert state is not None
    assert state["step"] == 4
    with monkeypatch.context() as patch:
        patch.setattr(head_run, "save_head", killed_save_head)  # at the very end, when the state is saved and no head
        assert train(*flags, out="parts") == 130
    assert train(*flags, out="parts") == 0
    heads = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("whole", "parts")]
    assert heads[0] == heads[1]
    whole, parts = (tensors_of(load_state(tmp_path / out / STAGES_FOLDER / "run")) for out in ("whole", "parts"))
    assert len(whole) > 20
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


def tensors_of(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in nested dicts and lists, by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path: tensor for key, item in items for path, tensor in tensors_of(item, f"{name}.{key}").items()}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--tokens", "5000000"), r"tokens=5000000: needs about \d+ prompts, and \d+ documents give \d+"),
        (("--tokens", "2000", "--max-tokens", "200"), "max_tokens=200: .* the target's context is 128"),
        (("--tokens", "2000", "--draft-vocab", "9999"), "draft_vocab=9999: choose auto, full, or a number"),
        (("--tokens", "2000", "--draft-vocab", "999999999"), "draft_vocab=999999999: choose auto, full, or a number"),
        (
            ("--tokens", "2000", "--batch", "4000"),
            "batch=4000: at most 100 samples are taken for 2000 tokens; lower batch",
        ),
        (
            ("--tokens", "2000", "--text-tokens", "9", "--batch", "900000"),
            r"training needs about .* GiB, cpu has .* free; lower batch",
        ),
        (("--tokens", "2000", "--shares", "1", "2"), "there are 1 files; give one share for each"),
        (("--tokens", "2000", "--shares", "nan"), "shares=.* must be numbers"),
        (("--taps", "0", "7"), r"taps=\(0, 7\): each must be one of the target's layers"),
        (("--minutes", "60"), "minutes=60: steps=2 was given, too"),
        (("--kind", "dspark", "--unroll", "1"), "unroll=1: blocks of a dspark head have 2 tokens at least"),
        (("--kind", "dflash", "--markov-rank", "9"), "markov_rank=9: is for heads of dspark; leave it out"),
        (("--layers", "3"), "layers=3: is for heads of dflash or dspark; leave it out"),
        (("--kind", "dspark", "--markov-rank", "0"), "markov_rank=0: must be at least 1"),
        (("--kind", "dflash", "--unroll", "70"), "unroll=70: a round has 1 to 16 drafts"),
        (("--unroll", "0"), "unroll=0: a round has 1 to 16 drafts"),
        (("--layers", "0"), "layers=0: must be at least 1"),
        (("--batch", "0"), "batch=0: must be at least 1"),
        (("--save-every", "0"), "save_every=0: must be at least 1"),
        (("--max-tokens", "0"), "max_tokens=0: must be at least 1"),
        (("--eval-tokens", "0"), "eval_tokens=0: must be at least 1"),
        (("--rate", "nan"), "rate=nan: must be at least 0"),
        (("--start", "nowhere"), "'nowhere' does not exist"),
    ],
)
def test_impossible_settings_are_refused_with_the_numbers(
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    complaint: str,
) -> None:
    assert train(*flags, "--no-eval", "--steps", "2") == 2
    assert_line(capsys.readouterr().err, complaint)
    assert not list(tmp_path.rglob("*.npz")), "nothing was sampled"


def assert_line(text: str, pattern: str) -> None:
    assert re.search(f"error: .*({pattern})|error: ({pattern})", text), text


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("none.txt", None, "no such file"),
        ("data.csv", "a,b", "is not .txt, .txt.xz or .jsonl"),
        ("few.txt", "One.\n<|endoftext|>\nTwo.\n", "data: 2 documents; give at least 16"),
        ("bad.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', 'line 2: has neither "prompt" nor "messages"'),
        ("worse.jsonl", "{\n", "line 1: is not JSON"),
        ("empty.jsonl", "", "empty; give files with text"),
        ("odd.jsonl", '{"messages": ["hi"]}\n', "line 1: a message is"),
        ("torn.txt.xz", "One.\n", "is not a whole .xz file"),
        ("mute.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}\n', "holds no user's turn"),
    ],
)
def test_bad_data_is_refused(
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    complaint: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    for tokens in ("500", "600"):  # what was refused does not bind the folder
        assert train("--tokens", tokens, "--no-eval", data=tmp_path / name) == 2
        assert complaint in capsys.readouterr().err


def test_a_folder_of_another_run_is_left_alone(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tokens", "500", "--steps", "2", "--no-eval")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    assert train(*flags, out="taken") == 2
    assert "holds files of something else" in capsys.readouterr().err
    assert train(*flags) == 0
    assert train(*flags, "--tokens", "600") == 2
    assert "tokens=600: the run in" in capsys.readouterr().err
    assert train(*flags, "--target", str(tiny_model())) == 2
    assert "target=llama, " in capsys.readouterr().err
    assert train(*flags, "--rate", "0.5") == 2
    assert "was started with rate=0.002" in capsys.readouterr().err
    # Samples of another model do not fit.
    shutil.rmtree(tmp_path / "head" / STAGES_FOLDER / "run")
    shards = sorted((tmp_path / "head" / STAGES_FOLDER / "samples").glob("*.npz"))
    found = Samples.load(shards[0])
    Samples(found.tokens + 10_000, found.starts, found.prompt_lens).save(shards[0])
    assert train(*flags) == 2
    assert "is not in the target's vocabulary of 320" in capsys.readouterr().err


def test_kinds_are_trained_on_the_same_samples_which_may_be_made_elsewhere(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, first = ("--tokens", "600", "--text-tokens", "2000", "--steps", "2", "--no-eval"), tmp_path / "first"
    assert train(*flags, "--stop-after", "prompts", "--batch", "900000", out="first") == 0  # trained elsewhere
    assert {path.name for path in (first / STAGES_FOLDER).iterdir()} == {"options.json", "prompts.json", "texts.npz"}
    assert train(*flags, "--stop-after", "samples", out="first") == 0
    assert not (first / "config.json").exists()
    block = ("--kind", "dspark", "--layers", "1", "--blocks", "4", "--mlp", "64", "--samples-of", str(first))
    assert train(*flags, *block, out="second") == 0
    assert not (tmp_path / "second" / STAGES_FOLDER / "prompts.json").exists()
    assert json.loads((tmp_path / "second" / "config.json").read_text())["intermediate_size"] == 64
    assert train(*flags, out="first") == 0
    reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in ("first", "second")]
    assert len({(report["samples"], report["sampled_tokens"], report["text_tokens"]) for report in reports}) == 1
    assert train(*flags, *block, "--tokens", "700", out="third") == 2
    assert f"tokens=700: the run in {first} was started with tokens=600" in capsys.readouterr().err
    assert train(*flags, "--samples-of", str(tmp_path / "third"), out="fourth") == 2
    assert "third: no head was trained there" in capsys.readouterr().err


def test_chats_and_ready_prompts_come_from_jsonl(train: Callable[..., int], tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"Tell {name} {n}"}, {"role": "assistant", "content": "x"}]}
        for n in range(10)
        for name in NAMES
    ]
    lines = [*chats, *({"prompt": story(name, "hat", 3)[:20]} for name in NAMES)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert train("--tokens", "300", "--steps", "1", "--no-eval", data=tmp_path / "chats.jsonl") == 0
    prompts = json.loads((tmp_path / "head" / STAGES_FOLDER / "prompts.json").read_text())[0]
    assert {source for source, _ in prompts} == {"chats"}
    assert any(tokens[0] == 1 and tokens.count(2) == 1 and tokens[-1] != 0 for _, tokens in prompts)


def test_documents_join_the_samples_and_training_continues_from_another_head(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tokens", "600", "--steps", "2", "--no-eval")
    assert train(*flags, out="first") == 0
    more = (*flags, "--start", str(tmp_path / "first"), "--text-tokens", "4000")
    assert train(*more, out="second") == 0
    first, second = (json.loads((tmp_path / out / "report.json").read_text()) for out in ("first", "second"))
    assert first["text_tokens"] == 0
    assert 4000 <= second["text_tokens"] < 4200
    texts = Samples.load(tmp_path / "second" / STAGES_FOLDER / "texts.npz")
    lasts = texts.tokens[texts.starts[1:] - 1]
    assert ((lasts == 0) | (texts.starts[1:] - texts.starts[:-1] == 24 + 40)).all()  # ended, or cut to fit
    assert second["rows"] > first["rows"]
    # The second began where the first ended: a step at a tiny rate leaves it there.
    still = (*flags, "--start", str(tmp_path / "first"), "--rate", "1e-12")
    assert train(*still, out="third") == 0
    weights = [load_file(tmp_path / out / "model.safetensors") for out in ("first", "third")]
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name
    assert train(*flags, "--start", str(tmp_path / "first"), "--mlp", "64", out="fourth") == 2
    assert "has other sizes or taps" in capsys.readouterr().err


def test_a_head_starts_from_one_with_other_draft_tokens() -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    start, head = (fresh_head(target, (1, 2, 3), np.array(ids), 0) for ids in ([2, 5, 9], [1, 5, 9, 11]))
    with torch.no_grad():
        for number, parameter in enumerate(start.parameters()):
            parameter.fill_(number + 7)
    fresh = head.state_dict()["head.weight"].clone()
    copy_weights(head, start, Path("start"))
    given, got = start.state_dict(), head.state_dict()
    for name in given.keys() - {"head.weight"}:
        assert torch.equal(got[name], given[name]), name
    assert torch.equal(got["head.weight"][1:3], given["head.weight"][1:])
    assert torch.equal(got["head.weight"][[0, 3]], fresh[[0, 3]])


def test_a_head_does_not_start_from_one_whose_weights_mean_something_else() -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    head = fresh_head(target, (1, 2, 3), None, 0)
    others = {
        name: replace(head.config, **{name: value})
        for name, value in (("norm_before_residual", True), ("own_head", False))
    }
    start, borrows = (Eagle3Head(config, target, "cpu", torch.float32, None) for config in others.values())
    with pytest.raises(ConfigError, match="start=other: has norm_before_residual=True, and new heads have False"):
        copy_weights(head, start, Path("other"))
    kept = head.state_dict()["head.weight"].clone()
    copy_weights(head, borrows, Path("other"))
    assert torch.equal(head.state_dict()["head.weight"], kept)


def test_a_block_head_keeps_the_mask_token_of_the_one_it_starts_from(tmp_path: Path) -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    order = HeadOrder("", (), tmp_path, kind=DFLASH, options=HeadOptions(unroll=3))
    samples = Samples.pack([np.arange(1, 300)], [1])  # the token that never occurs is 0
    made = [
        new_head(order, target, samples, None, start)
        for start in (None, fresh_block_head(target, (1, 2), None, order, 7))
    ]
    assert [head.config.mask_token for head in made] == [0, 7]


def test_merlin_is_made_end_to_end_and_finds_its_head(toy: Path, tmp_path: Path) -> None:
    order = MerlinOrder(
        toy / "data",
        tmp_path / "merlin",
        tmp_path / "work",
        PretrainOptions(row_len=64, batch_rows=4, steps=2, eval_every=2, save_every=2, epoch_tokens=20_000),
        head_tokens=2500,
        head_steps=2,
        head_rows=32,
        device="cpu",
        shape=SHAPE,
        draft_vocab="auto",
        max_tokens=24,
        prompt_tokens=16,
        text_tokens=1000,
        eval_prompts=4,
        eval_tokens=8,
    )
    make_merlin(order)
    with LLM(str(tmp_path / "merlin"), max_rows=1, max_len=64, windows="fixed") as llm:
        assert any(d.field == "drafter" and d.value == "eagle3" for d in llm.decisions)
        [output] = llm.generate("Tom had", SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
        assert output.stats.drafted > 0  # two steps of training may well say "end of text" at once
