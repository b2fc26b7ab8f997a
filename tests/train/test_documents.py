"""Reading text: documents, sources with shares, and a hold-out that depends on the document alone."""

import lzma

import pytest

from peregrine.errors import ConfigError
from peregrine.train.documents import Source, find_sources, held_out, read_texts, sample_texts


def write(path, documents):
    text = "".join(f"{document}\n<|endoftext|>\n" for document in documents)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz"])
def test_documents_come_back_without_their_end(tmp_path, name):
    documents = ["one\n\ntwo", "<|user|>\nhi\n<|assistant|>\nho", "not an <|endoftext|> line"]
    assert list(read_texts(write(tmp_path / name, documents))) == documents


def test_an_unfinished_last_document_counts(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n\n<|endoftext|>\ntwo\n")
    assert list(read_texts(tmp_path / "a.txt")) == ["one", "two"]


def test_about_one_document_in_a_hundred_is_held_out():
    kept = [held_out(f"document {i}") for i in range(20_000)]
    assert 140 < sum(kept) < 260
    assert held_out("document 7") == held_out("document 7")


def test_shards_of_one_name_are_one_source(tmp_path):
    for name in ("tales_0.txt", "tales_1.txt.xz", "chat.txt", "val_tales.txt"):
        write(tmp_path / name, ["x"])
    sources = find_sources(tmp_path, {"tales": 0.6, "chat": 0.2, "absent": 0.2})
    assert [(s.name, len(s.paths)) for s in sources] == [("tales", 2), ("chat", 1)]
    assert [s.share for s in sources] == [pytest.approx(0.75), pytest.approx(0.25)]


def test_unknown_names_are_mixed_by_size_and_validation_is_left_out(tmp_path):
    write(tmp_path / "b.txt", ["y" * 983])  # 1000 bytes with its end
    write(tmp_path / "c.txt", ["y" * 2983])
    write(tmp_path / "val_c.txt", ["y"])
    sources = find_sources(tmp_path, {"tales": 1.0})
    assert [s.name for s in sources] == ["b", "c"]
    assert sources[1].share == pytest.approx(0.75, abs=0.01)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.txt"):
        find_sources(tmp_path, {})


def test_a_sample_has_about_its_size_and_no_held_out_document(tmp_path):
    path = write(tmp_path / "a.txt", [f"document {i:06d} {'x' * 80}" for i in range(3000)])
    sample = list(sample_texts(Source("a", (path,), 1.0), 100_000))
    assert 80_000 < sum(map(len, sample)) < 120_000
    assert not any(map(held_out, sample))
