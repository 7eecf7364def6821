"""The tokenizer loses nothing, is the same every time, and is saved whole."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.errors import DataError
from shardtorch.train._tokenizer import (
    MIN_VOCAB_SIZE,
    SEPARATOR,
    SEPARATOR_ID,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = ["the cat sat on the mat, the rat did not", "a naïve café 🙂 the end\n\n    indented", "the the the 12345"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=290)


@given(
    text=st.one_of(st.text(), st.lists(st.sampled_from([SEPARATOR, "<|", " the", "\r\n", "\x00", "🙂"])).map("".join))
)
def test_every_text_survives(tokenizer, text):
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert SEPARATOR_ID not in encoding.ids
    assert all(0 < token < 290 for token in encoding.ids)


@given(st.lists(st.text(), max_size=5))
def test_separators_are_left_out_of_a_decoded_stream(tokenizer, texts):
    ids = [token for text in texts for token in (SEPARATOR_ID, *tokenizer.encode(text).ids)]
    assert tokenizer.decode(ids) == "".join(texts)


def test_vocabulary_has_its_size_the_separator_and_all_bytes(tokenizer):
    assert tokenizer.get_vocab_size() == 290
    assert tokenizer.token_to_id(SEPARATOR) == SEPARATOR_ID
    assert train_tokenizer([], MIN_VOCAB_SIZE).get_vocab_size() == MIN_VOCAB_SIZE
    assert len(tokenizer.encode("the").ids) < 3


def test_same_texts_give_the_same_tokenizer_in_another_process(tokenizer):
    code = (
        "from shardtorch.train._tokenizer import train_tokenizer\n"
        f"print(ascii(train_tokenizer({TEXTS!a}, 290).to_str()))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == ascii(tokenizer.to_str())


def test_too_small_a_vocabulary():
    with pytest.raises(
        DataError, match=r"256 bytes and the separator(.|\n)*vocab_size=256(.|\n)*vocab_size=257 or more"
    ):
        train_tokenizer(TEXTS, vocab_size=256)


def test_too_short_a_text():
    with pytest.raises(
        DataError, match=r"got: (\d+) tokens from all of it, where vocab_size=5000\n  fix: use vocab_size=\1 "
    ):
        train_tokenizer(TEXTS, vocab_size=5000)


def test_error_of_the_documents_comes_through():
    def broken():
        yield "text"
        raise DataError("line 7 is broken.", got="x", fix="y")

    with pytest.raises(DataError, match="line 7 is broken"):
        train_tokenizer(broken(), 257)


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    text = f"the naïve {SEPARATOR} 🙂"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    assert SEPARATOR_ID not in loaded.encode(text).ids
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_interrupted_save_leaves_the_old_file(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_tokenizer(tokenizer, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_or_damaged_file(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: a tokenizer file must be there and whole"):
        load_tokenizer(path)
    path.write_text(tokenizer.to_str()[:-100])
    with pytest.raises(DataError, match=r"must be there and whole"):
        load_tokenizer(path)


def test_foreign_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "other.json"))
    with pytest.raises(DataError, match=r"must be token 0\.\n  got: token None"):
        load_tokenizer(tmp_path / "other.json")
