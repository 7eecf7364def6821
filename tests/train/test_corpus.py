"""Where text comes from, what goes wrong on the way, and which of it is held out."""

import itertools
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.errors import DataError
from shardtorch.train._corpus import PIECE_CHARACTERS, HeldoutSplit, cut, documents, source_fingerprint

prose = st.lists(st.sampled_from(["a word ", "é", "\n", "\n\n", "🙂"]), max_size=60).map("".join)
corpora = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=40).filter(lambda texts: len(set(texts)) > 1)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


# -- what can be read


def test_topics_are_the_sorted_documentation_of_python():
    texts = list(documents("topics"))
    assert len(texts) > 50
    assert texts[0].startswith('The "assert" statement')
    assert texts == list(documents("topics"))


def test_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    assert list(documents(write(tmp_path / "a.TXT", b"\xef\xbb\xbfna\xc3\xafve\r\n\n"))) == ["naïve\r\n\n"]


def test_jsonl_file_is_a_document_per_line(tmp_path):
    path = write(
        tmp_path / "a.jsonl", jsonl({"text": "one", "id": 1}, {"text": ""}) + "\n  \n" + jsonl({"text": "two\n"})
    )
    assert list(documents(path)) == ["one", "", "two\n"]


def test_parquet_file_is_a_document_per_row(tmp_path):
    path = parquet(tmp_path / "a.parquet", body=[f"é{i}" for i in range(3000)], id=list(range(3000)))
    assert list(documents(path, text_field="body")) == [f"é{i}" for i in range(3000)]


def test_folder_is_read_recursively_in_path_order_without_hidden_files(tmp_path):
    write(tmp_path / "b.txt", "last")
    write(tmp_path / "a" / "deep" / "x.jsonl", jsonl({"text": "first"}, {"text": "second"}))
    write(tmp_path / "a" / "y.txt", "third")
    write(tmp_path / ".gitattributes", "no text")
    write(tmp_path / ".cache" / "z.txt", "no text")
    assert list(documents(str(tmp_path))) == ["first", "second", "third", "last"]
    assert list(documents(f"file://{tmp_path}")) == ["first", "second", "third", "last"]
    assert list(documents(f"{tmp_path}/**/*.txt")) == ["third", "last"]


def test_corpus_may_lie_in_a_hidden_folder_and_behind_links(tmp_path):
    write(tmp_path / ".home" / "a.txt", "text")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "b.txt").symlink_to(tmp_path / ".home" / "a.txt")
    assert list(documents(str(tmp_path / ".home"))) == list(documents(str(tmp_path / "link"))) == ["text"]


def test_remote_path_goes_through_fsspec():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.txt", b"two")
    memory.pipe("/corpus/a.jsonl", b'{"text": "one"}')
    try:
        assert list(documents("memory://corpus")) == ["one", "two"]
        assert len(source_fingerprint("memory://corpus")) == 32
    finally:
        memory.rm("/corpus", recursive=True)


# -- what can go wrong


@pytest.mark.parametrize("name", ["nowhere", "nowhere.txt", "*.txt", "empty"])
def test_missing_path_or_empty_folder(tmp_path, name):
    (tmp_path / "empty").mkdir()
    for read in (documents, source_fingerprint):
        with pytest.raises(
            DataError, match=r"must be a file or folder that exists(.|\n)*no such path, or no file in it"
        ):
            read(str(tmp_path / name))


def test_file_of_another_kind_is_not_skipped(tmp_path):
    write(tmp_path / "a.txt", "text")
    path = write(tmp_path / "notes.md", "text")
    with pytest.raises(
        DataError, match=r"must end in one of \.txt, \.jsonl, \.parquet(.|\n)*1 other.*of|among 2 .*notes\.md"
    ):
        documents(str(tmp_path))
    with pytest.raises(DataError, match=r"must end in one of"):
        documents(path)


def test_broken_line_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl({"text": "one"}) + '{"text": "tw')
    read = documents(path)
    assert next(read) == "one"
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 2: every line .* one JSON object(.|\n)*Unterminated string .*column 10"
    ):
        next(read)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"body": "x"}',
            r"line 1: the text field must be one of(.|\n)*text_field='text', but the fields are \['body'\]",
        ),
        ('["x"]', r"line 1: the text field must be one of"),
        ('{"text": null}', r"line 1: field 'text' must be text\.(.|\n)*NoneType"),
        ('{"text": 3}', r"line 1: field 'text' must be text\.(.|\n)*int 3"),
        (r'{"text": "ab\ud83d"}', r"line 1: text must be valid Unicode(.|\n)*lone surrogate '\\ud83d' at character 2"),
    ],
)
def test_record_without_text_is_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        list(documents(write(tmp_path / "a.jsonl", line)))


def test_undecodable_byte_is_named_with_its_offset(tmp_path):
    with pytest.raises(
        DataError, match=r"a\.txt: text must be UTF-8\.\n  got: byte 0xe9 at offset 3 .*\n  fix: .*iconv"
    ):
        list(documents(write(tmp_path / "a.txt", b"caf\xe9 au lait")))
    good = jsonl({"text": "one"})
    with pytest.raises(DataError, match=rf"b\.jsonl: .*\n  got: byte 0xff at offset {len(good) + 10} "):
        list(documents(write(tmp_path / "b.jsonl", good.encode() + b'{"text": "\xff"}')))


def test_damaged_parquet_and_wrong_columns(tmp_path):
    path = parquet(tmp_path / "a.parquet", body=["x", None], id=[1, 2])
    with pytest.raises(DataError, match=r"a\.parquet: the text field(.|\n)*the fields are \['body', 'id'\]"):
        list(documents(path))
    with pytest.raises(DataError, match=r"a\.parquet, row 2: field 'body' must be text(.|\n)*NoneType"):
        list(documents(path, text_field="body"))
    with pytest.raises(DataError, match=r"a\.parquet, row 1: field 'id' must be text(.|\n)*int 1"):
        list(documents(path, text_field="id"))
    content = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(DataError, match=r"b\.parquet: a \.parquet file must be whole"):
        list(documents(write(tmp_path / "b.parquet", content[:-20])))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow(.|\n)*pip install 'shardtorch\[parquet\]'"):
        list(documents(write(tmp_path / "a.parquet", b"")))


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_corpus_without_text(tmp_path, content):
    write(tmp_path / "a.txt", content)
    write(tmp_path / "b.txt", "")
    with pytest.raises(DataError, match=r"must hold text"):
        list(documents(str(tmp_path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    os.chmod(path, 0)
    with pytest.raises(DataError, match=r"must be readable(.|\n)*Permission denied"):
        list(documents(path))


def test_file_that_vanishes_while_reading(tmp_path):
    write(tmp_path / "a.txt", "text")
    path = write(tmp_path / "b.txt", "text")
    read = documents(str(tmp_path))
    next(read)
    os.unlink(path)
    with pytest.raises(DataError, match=r"b\.txt: a file of the corpus must be readable"):
        next(read)


def test_unknown_protocol():
    with pytest.raises(DataError, match=r"protocol(.|\n)*nope"):
        documents("nope://bucket/a.txt")


# -- Hugging Face datasets


def test_dataset_without_the_hub_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package `datasets`(.|\n)*pip install 'shardtorch\[hub\]'"):
        documents("hf:owner/name")


@pytest.mark.parametrize("source", ["hf:", "hf:owner/", "hf:a/b/c/d", "hf::train"])
def test_dataset_name_must_have_the_known_form(source):
    with pytest.raises(DataError, match=r"is named 'hf:OWNER/NAME\[/SUBSET\]\[:SPLIT\]'"):
        documents(source)


def test_dataset_by_name(tmp_path, monkeypatch):
    """`datasets` takes a local folder for a name, so the real package is tested without a download."""
    pytest.importorskip("datasets")
    write(tmp_path / "owner" / "name" / "train.jsonl", jsonl(*({"text": f"train {i}"} for i in range(4))))
    write(tmp_path / "owner" / "name" / "test.jsonl", jsonl({"text": "test"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert list(documents("hf:owner/name")) == [f"train {i}" for i in range(4)]
    assert list(documents("hf:owner/name/default:train[:2]")) == ["train 0", "train 1"]
    assert list(documents("hf:owner/name:test")) == ["test"]
    with pytest.raises(DataError, match=r"text_field='body', but the fields are \['text'\]"):
        documents("hf:owner/name", text_field="body")
    with pytest.raises(DataError, match=r"the dataset must exist and load(.|\n)*nosplit"):
        documents("hf:owner/name:nosplit")


# -- fingerprint


def test_fingerprint_follows_content_and_order_but_not_names(tmp_path):
    write(tmp_path / "a" / "1.txt", "one")
    write(tmp_path / "a" / "2.txt", "two")
    write(tmp_path / "b" / "x.txt", "one")
    write(tmp_path / "b" / "y.txt", "two")
    write(tmp_path / "c" / "1.txt", "two")
    write(tmp_path / "c" / "2.txt", "one")
    write(tmp_path / "d" / "1.txt", "onet")
    write(tmp_path / "d" / "2.txt", "wo")
    prints = {name: source_fingerprint(str(tmp_path / name)) for name in "abcd"}
    assert prints["a"] == prints["b"]
    assert len(set(prints.values())) == 3
    assert source_fingerprint("topics") == source_fingerprint("topics")


# -- pieces and split


@given(prose, st.integers(1, 30))
def test_pieces_are_short_not_empty_and_join_to_the_document(document, size):
    pieces = cut(document, size)
    assert "".join(pieces) == document
    assert all(0 < len(piece) <= size for piece in pieces)
    assert all(len(piece) > size // 2 for piece in pieces[:-1])


@given(prose, prose, st.integers(1, 30))
def test_appended_text_changes_only_the_last_piece(document, more, size):
    unchanged = cut(document, size)[:-1]
    assert cut(document + more, size)[: len(unchanged)] == unchanged


def test_pieces_end_at_the_best_place():
    assert cut("one\n\ntwo\nthree", 10) == ["one\n\ntwo\n", "three"]
    assert cut("a\nlong\n\ntwo\nmore", 12) == ["a\nlong\n\n", "two\nmore"]
    assert cut("some more words", 12) == ["some more ", "words"]
    assert cut("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]


@given(corpora, st.floats(0.001, 0.999))
def test_split_has_two_sides_and_keeps_equal_texts_together(texts, fraction):
    split = HeldoutSplit.choose(texts, fraction)
    pieces = list(split.pieces(texts))
    heldout, train = ({p.text for p in pieces if p.heldout is side} for side in (True, False))
    assert heldout
    assert train
    assert heldout.isdisjoint(train)
    assert [p.text for p in pieces] == texts
    assert split.num_documents == len(texts)


@given(corpora, corpora, st.floats(0.05, 0.95))
def test_split_is_stable_when_documents_are_added(texts, more, fraction):
    """But for the pieces that were pushed over because a side would have been empty."""
    before, after = HeldoutSplit.choose(texts, fraction), HeldoutSplit.choose(texts + more, fraction)
    natural = int(fraction * (1 << 64))
    if before.threshold == natural:
        assert after.threshold == natural
        assert list(before.pieces(texts)) == list(after.pieces(texts))


def test_split_holds_out_about_the_fraction():
    texts = [f"document {i}" for i in range(4000)]
    heldout = [p for p in HeldoutSplit.choose(texts, 0.05).pieces(texts) if p.heldout]
    assert 140 <= len(heldout) <= 260  # 200 +- 4.4 standard deviations.


@given(st.integers(2, 12), st.floats(0.05, 0.95))
def test_one_long_document_has_both_sides(num_pieces, fraction):
    document = "".join(f"line {i}\n" for i in range(num_pieces * PIECE_CHARACTERS // 9))
    pieces = list(HeldoutSplit.choose([document], fraction).pieces([document]))
    assert {p.heldout for p in pieces} == {True, False}
    assert "".join(p.text for p in pieces) == document
    assert not pieces[0].continues
    for previous, piece in itertools.pairwise(pieces):
        assert piece.continues is (piece.heldout is previous.heldout)


def test_documents_never_continue_each_other():
    assert not any(p.continues for p in HeldoutSplit(0, 3).pieces(["one", "", "two"]))


@pytest.mark.parametrize("texts", [[], ["one"], ["same", "same"], ["", "one"]])
def test_split_needs_two_different_documents(texts):
    with pytest.raises(
        DataError, match=rf"two different documents(.|\n)*got: {len(texts)} document\(s\) with {min(1, len(texts))} "
    ):
        HeldoutSplit.choose(texts, 0.1)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 5, float("nan")])
def test_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(DataError, match="must lie between 0 and 1"):
        HeldoutSplit.choose(["one", "two"], fraction)
