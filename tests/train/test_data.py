"""The token cache survives what happens to files; batches are exact and seekable; every held-out token counts."""

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import math
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardtorch.errors import DataError
from shardtorch.train import _data
from shardtorch.train._corpus import HeldoutSplit, documents
from shardtorch.train._data import (
    IGNORED,
    Corpus,
    bits_per_byte,
    heldout_batches,
    prepare,
    train_loader,
    zlib_bits_per_byte,
)
from shardtorch.train._tokenizer import SEPARATOR_ID, load_tokenizer

law = settings(max_examples=30)
batch_splits = st.tuples(st.integers(1, 4), st.integers(1, 4))  # Rows per process, number of processes.


def corpus_of(train=range(100), heldout=range(100)):
    return Corpus(
        train=np.array(train, np.uint16),
        heldout=np.array(heldout, np.uint16),
        num_heldout_bytes=1,
        vocab_size=1 << 16,
        tokenizer_path=Path("none"),
        fingerprint="none",
    )


def assert_equal_batches(one, other):
    for name in ("tokens", "targets"):
        np.testing.assert_array_equal(one[name], other[name])


def joined(batches):
    """Global batch out of the rows of all processes."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ("tokens", "targets")}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(
            f"Document {i} speaks of naïve cats, mats and hats, {i} times over.\n" * (i + 1)
        )
    return str(folder)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def folder_of(cache):
    (folder,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return folder


# -- prepare


def test_tokens_are_the_documents_each_after_a_separator(source, cache):
    corpus = prepare(source, 300, cache)
    assert isinstance(corpus.train, np.memmap)
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    pieces = list(HeldoutSplit.choose(documents(source), 0.05).pieces(documents(source)))
    for heldout, tokens in ((False, corpus.train), (True, corpus.heldout)):
        expected = [p.text for p in pieces if p.heldout is heldout]
        starts = np.flatnonzero(tokens == SEPARATOR_ID)
        assert starts[0] == 0
        assert [tokenizer.decode(ids[1:].tolist()) for ids in np.split(tokens, starts[1:])] == expected
    text = "".join(p.text for p in pieces if p.heldout).encode()
    assert corpus.heldout_text() == text
    assert corpus.num_heldout_bytes == len(text)


def test_one_long_file_keeps_its_context(tmp_path, cache):
    (tmp_path / "book.txt").write_text("".join(f"This is line {i} of the book.\n\n" for i in range(8000)))
    corpus = prepare(str(tmp_path / "book.txt"), 300, cache)
    text = (tmp_path / "book.txt").read_text()
    pieces = list(HeldoutSplit.choose([text], 0.05).pieces([text]))
    for heldout, tokens in ((False, corpus.train), (True, corpus.heldout)):
        side = [p for p in pieces if p.heldout is heldout]
        assert tokens.tolist().count(SEPARATOR_ID) == sum(not p.continues for p in side)
        assert load_tokenizer(corpus.tokenizer_path).decode(tokens.tolist()) == "".join(p.text for p in side)
    assert corpus.train.tolist().count(SEPARATOR_ID) < len(pieces) // 3


def test_tokenizer_has_not_seen_the_heldout_text(tmp_path, cache):
    texts = [f"{letter * 40} {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    for text in texts:
        (tmp_path / f"{text[-1]}.txt").write_text(text)
    corpus = prepare(f"{tmp_path}/*.txt", 262, cache, heldout_fraction=0.3)
    vocabulary = load_tokenizer(corpus.tokenizer_path).get_vocab()
    heldout = {piece.text[-1] for piece in HeldoutSplit.choose(texts, 0.3).pieces(texts) if piece.heldout}
    assert heldout
    assert not any(letter * 2 in vocabulary for letter in heldout)


def test_topics(cache, capfd):
    corpus = prepare("topics", 2048, cache)
    size = sum(len(text.encode()) for text in documents("topics"))
    assert 0.02 < corpus.num_heldout_bytes / size < 0.15
    assert 2.0 < zlib_bits_per_byte(corpus.heldout_text()) < 2.6
    assert 3.0 < size / (len(corpus.train) + len(corpus.heldout)) < 4.5
    assert max(corpus.train.max(), corpus.heldout.max()) < 2048
    assert "".join(capfd.readouterr()) == ""


def test_second_call_reads_the_cache(source, cache, monkeypatch):
    first = prepare(source, 300, cache)
    monkeypatch.setattr(_data, "_tokenize", None)
    second = prepare(source, 300, cache)
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.heldout, second.heldout)
    assert (first.num_heldout_bytes, first.tokenizer_path) == (second.num_heldout_bytes, second.tokenizer_path)


def test_equal_text_gives_equal_files_everywhere(source, tmp_path):
    folders = []
    for name in ("one", "two"):
        prepare(source, 300, tmp_path / name)
        folders.append({path.name: path.read_bytes() for path in folder_of(tmp_path / name).iterdir()})
    assert folders[0] == folders[1]
    assert set(folders[0]) == {"manifest.json", "tokenizer.json", "train.tokens", "heldout.tokens"}


def test_changed_text_or_settings_make_another_cache(source, cache):
    prints = [prepare(source, 300, cache).fingerprint, prepare(source, 301, cache).fingerprint]
    prints.append(prepare(source, 300, cache, heldout_fraction=0.2).fingerprint)
    with open(f"{source}/00.txt", "a") as file:
        file.write("!")
    prints.append(prepare(source, 300, cache).fingerprint)
    assert len(set(prints)) == 4


def test_large_vocabulary_takes_wider_tokens():
    assert _data._token_dtype(1 << 16) == "<u2"
    assert _data._token_dtype((1 << 16) + 1) == "<u4"


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train.tokens", "heldout.tokens"])
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_damaged_cache_is_made_again_with_a_warning(source, cache, caplog, name, damage):
    before = prepare(source, 300, cache)
    expected = np.array(before.train)
    path = folder_of(cache) / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "flip":
        path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        after = prepare(source, 300, cache)
    assert "is damaged and is made again" in caplog.text
    np.testing.assert_array_equal(after.train, expected)
    caplog.clear()
    prepare(source, 300, cache)
    assert caplog.text == ""


def test_killed_build_leaves_nothing_half_usable(source, cache):
    """The process is killed while it encodes; the next one finds no folder, cleans up and makes it."""
    code = f"""
import os, signal
from shardtorch.train import _data
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
_data._size_and_checksum = die
_data.prepare({source!r}, 300, {str(cache)!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == []
    assert len(list(cache.glob(".*.building-*"))) == 1
    corpus = prepare(source, 300, cache)
    assert len(corpus.train) > 1000
    assert list(cache.glob(".*.building-*")) == []


def test_processes_at_once_make_it_once(source, cache):
    code = f"""
from shardtorch.train import _data
tokenize = _data._tokenize
def counted(*args):
    print("built")
    return tokenize(*args)
_data._tokenize = counted
corpus = _data.prepare({source!r}, 300, {str(cache)!r})
print(len(corpus.train), corpus.fingerprint)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(output.count("built") for output in outputs) == 1
    assert len({tuple(output[-2:]) for output in outputs}) == 1


def test_second_to_publish_uses_what_is_there(source, cache, monkeypatch):
    """As when hosts share a file system that has no locks: another one publishes while this one builds."""
    tokenize, published = _data._tokenize, []

    def overtaken(*args):
        if not published:
            published.append(None)
            published.append(prepare(source, 300, cache))
        return tokenize(*args)

    monkeypatch.setattr(_data, "_tokenize", overtaken)
    monkeypatch.setattr(_data, "_locked", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(_data.socket, "gethostname", iter(["here", "there"]).__next__)
    corpus = prepare(source, 300, cache)
    np.testing.assert_array_equal(corpus.train, published[1].train)
    assert list(cache.glob(".*.building-*")) == []


def test_failed_build_leaves_no_folder_and_names_the_cause(source, cache, tmp_path):
    (tmp_path / "text" / "zz.jsonl").write_text('{"text": ')
    with pytest.raises(DataError, match=r"zz\.jsonl, line 1: every line"):
        prepare(source, 300, cache)
    assert [path for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_text_that_changes_meanwhile(source, cache, monkeypatch):
    tokenize = _data._tokenize

    def edited(*args):
        Path(source, "zz.txt").write_text("One more.")
        return tokenize(*args)

    monkeypatch.setattr(_data, "_tokenize", edited)
    with pytest.raises(DataError, match="must stay as it is while it is tokenized"):
        prepare(source, 300, cache)
    assert [path for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_vocabulary_that_the_text_cannot_fill(source, cache):
    with pytest.raises(DataError, match=r"long enough to fill the vocabulary"):
        prepare(source, 5000, cache)


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: the token cache must be a local folder that can be written"):
        prepare(source, 300, tmp_path / "file")


def test_progress_goes_to_the_console_only(source, cache, capfd):
    out = io.StringIO()
    prepare(source, 300, cache, console=Console(file=out, force_terminal=True, width=100))
    assert "encoding" in out.getvalue()
    assert "".join(capfd.readouterr()) == ""


# -- training batches


@law
@given(st.integers(2, 200), st.integers(1, 50))
def test_windows_cover_every_token_and_overlap_by_one(num_tokens, seq_len):
    seq_len = min(seq_len, num_tokens - 1)
    stream = np.arange(num_tokens)
    windows = [_data._Windows(stream, seq_len)[i] for i in range(len(_data._Windows(stream, seq_len)))]
    targets = np.concatenate([w["targets"] for w in windows])
    assert set(targets.tolist()) == set(range(1, num_tokens))
    assert 0 <= len(targets) - (num_tokens - 1) < seq_len  # Only the last window repeats something.
    for window in windows:
        assert window["tokens"].shape == window["targets"].shape == (seq_len,)
        np.testing.assert_array_equal(window["targets"], window["tokens"] + 1)
    for before, after in itertools.pairwise(windows[:-1]):
        assert before["targets"][-1] == after["tokens"][0]


@law
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_batch_has_the_promised_shape_and_targets(batch_size, seq_len, seed):
    batch = train_loader(corpus_of(), batch_size, seq_len, seed)[3]
    assert batch.keys() == {"tokens", "targets"}
    for array in batch.values():
        assert array.shape == (batch_size, seq_len)
        assert array.dtype == np.int64
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_every_epoch_visits_every_window_once_in_an_order_of_its_own(seed, batch_size):
    corpus = corpus_of(range(20 * 5 * 3 + 1))  # 60 windows of 5: a multiple of every batch size.
    loader = train_loader(corpus, batch_size, 5, seed)
    num_batches = 60 // batch_size
    epochs = [
        [start for k in range(num_batches) for start in loader[epoch * num_batches + k]["tokens"][:, 0].tolist()]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(0, 300, 5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@law
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_batch_is_a_function_of_seed_and_index(seed, indices):
    loader = train_loader(corpus_of(), 3, 7, seed)
    for k in indices:
        assert_equal_batches(loader[k], train_loader(corpus_of(), 3, 7, seed)[k])


def test_seeds_differ():
    orders = {
        tuple(train_loader(corpus_of(range(1000)), 8, 5, seed)[k]["tokens"][:, 0])
        for seed in range(20)
        for k in (0, 25)
    }
    assert len(orders) == 40


def test_order_is_pinned():
    """A resumed run must see the order of the version that it started with."""
    loader = train_loader(corpus_of(range(1001)), 4, 10, seed=7)
    assert [loader[k]["tokens"][:, 0].tolist() for k in (0, 1, 25)] == [
        [280, 840, 890, 450],
        [640, 810, 170, 870],
        [970, 330, 830, 740],
    ]


@law
@given(batch_splits, st.integers(1, 30), st.integers(0, 2**32 - 1), st.integers(0, 500))
def test_rows_of_all_processes_are_the_global_batch(split, seq_len, seed, k):
    rows, process_count = split
    corpus, batch_size = corpus_of(), rows * process_count
    parts = [
        train_loader(corpus, batch_size, seq_len, seed, process_index=p, process_count=process_count)[k]
        for p in range(process_count)
    ]
    assert all(part["tokens"].shape == (rows, seq_len) for part in parts)
    assert_equal_batches(joined(parts), train_loader(corpus, batch_size, seq_len, seed)[k])


@pytest.mark.parametrize(("stop", "process_count"), [(0, 1), (1, 2), (13, 1), (40, 2)])
def test_iterator_resumes_exactly_from_a_json_state(stop, process_count):
    import grain

    loader = train_loader(corpus_of(), 4, 7, seed=1, process_index=process_count - 1, process_count=process_count)
    options = grain.ReadOptions(num_threads=0)
    uninterrupted = iter(loader.to_iter_dataset(options))
    for _ in range(stop):
        next(uninterrupted)
    state = json.dumps(uninterrupted.get_state())
    assert len(state) < 100
    resumed = iter(loader.to_iter_dataset(options))
    resumed.set_state(json.loads(state))
    for k in range(stop, stop + 5):
        batch = next(resumed)
        assert_equal_batches(batch, next(uninterrupted))
        assert_equal_batches(batch, loader[k])


def test_loader_starts_no_thread_and_prints_nothing():
    code = """
import threading, numpy as np
from shardtorch.train._data import Corpus, train_loader
corpus = Corpus(np.arange(100, dtype=np.uint16), np.arange(9), 1, 300, None, "")
before = threading.active_count()
loader = train_loader(corpus, 4, 7, seed=0)
for k in range(50): loader[k]
assert threading.active_count() == before, threading.enumerate()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_module_does_not_load_jax_or_torch_xla():
    code = "import sys, shardtorch.train._data; assert not {'jax', 'torch_xla', 'grain', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_error_of_the_source_comes_through():
    class Broken:
        def __init__(self, tokens):
            self.tokens = tokens

        def __len__(self):
            return len(self.tokens)

        def __getitem__(self, where):
            if where.start >= 50:
                raise OSError("the disk went away")
            return self.tokens[where]

    import grain

    corpus = dataclasses.replace(corpus_of(), train=Broken(np.arange(100, dtype=np.uint16)))
    before = threading.active_count()
    loader = train_loader(corpus, 2, 10, seed=0)
    with pytest.raises(OSError, match="the disk went away"):
        list(map(loader.__getitem__, range(100)))
    with pytest.raises(OSError, match="the disk went away"):
        list(loader.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    assert threading.active_count() == before


def test_text_shorter_than_one_window():
    train_loader(corpus_of(range(11)), 1, 10, seed=0)[0]
    with pytest.raises(
        DataError, match=r"one window of seq_len \+ 1(.|\n)*got: 10 tokens, seq_len=10\n  fix: use seq_len=9 "
    ):
        train_loader(corpus_of(range(10)), 1, 10, seed=0)


@pytest.mark.parametrize("batches", [lambda *a, **k: train_loader(*a, seed=0, **k), heldout_batches])
def test_impossible_batches(batches):
    with pytest.raises(
        DataError, match=r"same number of sequences(.|\n)*batch_size=6, process_count=4(.|\n)*multiple of 4, such as 8"
    ):
        batches(corpus_of(), 6, 10, process_index=0, process_count=4)
    for bad in ({"batch_size": 0}, {"seq_len": 0}, {"process_index": 1}, {"process_index": -1}, {"process_count": 0}):
        with pytest.raises(DataError, match=rf"must be positive(.|\n)*{next(iter(bad))}={next(iter(bad.values()))}"):
            batches(corpus_of(), **({"batch_size": 4, "seq_len": 10} | bad))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(DataError, match=rf"unsigned 32-bit(.|\n)*seed={seed}"):
        train_loader(corpus_of(), 1, 10, seed=seed)


# -- held-out score


@law
@given(st.integers(2, 300), st.integers(1, 5), st.integers(1, 40))
def test_every_heldout_token_is_scored_once(num_tokens, batch_size, seq_len):
    corpus = corpus_of(heldout=range(1000, 1000 + num_tokens))
    batches = heldout_batches(corpus, batch_size, seq_len)
    assert all(
        array.shape == (batch_size, seq_len) and array.dtype == np.int64 for b in batches for array in b.values()
    )
    tokens, targets = (np.concatenate([b[name].ravel() for b in batches]) for name in ("tokens", "targets"))
    scored = targets != IGNORED
    assert scored.sum() == num_tokens - 1
    assert targets[scored].tolist() == list(range(1001, 1000 + num_tokens))
    np.testing.assert_array_equal(tokens[scored] + 1, targets[scored])
    assert set(tokens[~scored].tolist()) <= {SEPARATOR_ID}
    assert len(batches) == math.ceil((num_tokens - 1) / (batch_size * seq_len))


@law
@given(batch_splits, st.integers(2, 200), st.integers(1, 20))
def test_heldout_rows_of_all_processes_are_the_global_batches(split, num_tokens, seq_len):
    rows, process_count = split
    corpus = corpus_of(heldout=range(num_tokens))
    parts = [
        heldout_batches(corpus, rows * process_count, seq_len, process_index=p, process_count=process_count)
        for p in range(process_count)
    ]
    for whole, *rest in zip(heldout_batches(corpus, rows * process_count, seq_len), *parts, strict=True):
        assert_equal_batches(joined(rest), whole)


def test_heldout_stream_of_a_prepared_corpus(source, cache):
    corpus = prepare(source, 300, cache)
    first = heldout_batches(corpus, 2, 16)[0]
    assert first["tokens"][0, 0] == SEPARATOR_ID
    np.testing.assert_array_equal(first["targets"][0], corpus.heldout[1:17])


@law
@given(st.integers(1, 10**9), st.floats(0.01, 20))
def test_bits_per_byte_inverts_its_formula(num_bytes, bits):
    assert bits_per_byte(bits * num_bytes * math.log(2), num_bytes) == pytest.approx(bits)


def test_zlib_bits_per_byte():
    noise = np.random.default_rng(0).bytes(10_000)
    assert 8 <= zlib_bits_per_byte(noise) < 8.1
    assert zlib_bits_per_byte(b"abc") == 8 * len(zlib.compress(b"abc", 9)) / 3


def test_bits_per_byte_of_no_text():
    with pytest.raises(DataError, match="bits per byte need text"):
        bits_per_byte(1.0, 0)
    with pytest.raises(DataError, match="bits per byte need text"):
        zlib_bits_per_byte(b"")


def test_a_part_of_the_heldout_text_counts_its_own_bytes(tmp_path: Path) -> None:
    corpus = prepare("topics", 512, tmp_path)
    whole = corpus.with_heldout(len(corpus.heldout))
    assert whole is corpus
    part = corpus.with_heldout(1000)
    assert len(part.heldout) == 1000
    assert part.num_heldout_bytes == len(part.heldout_text())
    # The bytes of a token don't depend on its place: two parts together have the bytes of both.
    rest = dataclasses.replace(corpus, heldout=corpus.heldout[1000:])
    assert part.num_heldout_bytes + len(rest.heldout_text()) == corpus.num_heldout_bytes
