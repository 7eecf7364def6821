"""Token cache on disk, packed training sequences out of it, and the held-out score."""

import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from einops import rearrange
from jaxtyping import Int64, UInt
from rich.console import Console
from rich.progress import Progress

from shardtorch.errors import DataError

from ._corpus import PIECE_CHARACTERS, HeldoutSplit, documents, source_fingerprint
from ._tokenizer import SEPARATOR_ID, load_tokenizer, save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    import grain

IGNORED = -100
"""Target that is not scored, as in `torch.nn.functional.cross_entropy`."""

_FORMAT = 1  # Raise it when the files or their meaning change: caches of another format are then not found.
_PIECES_AT_ONCE = 512
_MANIFEST, _TOKENIZER, _TRAIN, _HELDOUT = "manifest.json", "tokenizer.json", "train.tokens", "heldout.tokens"
_logger = logging.getLogger(__name__)


class Batch(TypedDict):
    """Sequences to train on or to score, and what follows each token."""

    tokens: Int64[np.ndarray, "batch seq"]
    targets: Int64[np.ndarray, "batch seq"]
    """The token after each of `tokens`, or `IGNORED`."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenized corpus in a cache on disk. In both streams a separator stands before every document."""

    train: UInt[np.ndarray, " num_train_tokens"]
    """Tokens to train on, mapped from disk."""
    heldout: UInt[np.ndarray, " num_heldout_tokens"]
    """Held-out tokens, mapped from disk."""
    num_heldout_bytes: int
    """Bytes of held-out text in UTF-8, separators not counted."""
    vocab_size: int
    tokenizer_path: Path
    fingerprint: str
    """Hash of the text and of the settings that made the tokens: equal fingerprints, equal tokens."""

    def with_heldout(self, max_tokens: int) -> "Corpus":
        """The same corpus with at most `max_tokens` of its held-out tokens, the first ones, and their bytes."""
        if len(self.heldout) <= max_tokens:
            return self
        tokenizer = load_tokenizer(self.tokenizer_path)
        # A token of a byte-level vocabulary is written with one character per byte; the separator stands for no text.
        lengths = np.array([len(tokenizer.id_to_token(i) or "") for i in range(self.vocab_size)])
        lengths[SEPARATOR_ID] = 0
        heldout = self.heldout[:max_tokens]
        return replace(self, heldout=heldout, num_heldout_bytes=int(lengths[heldout].sum()))

    def heldout_text(self) -> bytes:
        """The held-out documents, joined, in UTF-8."""
        return load_tokenizer(self.tokenizer_path).decode(self.heldout.tolist(), skip_special_tokens=True).encode()


def prepare(
    source: str,
    vocab_size: int,
    cache_dir: str | os.PathLike[str],
    *,
    text_field: str = "text",
    heldout_fraction: float = 0.05,
    console: Console | None = None,
) -> Corpus:
    """Tokenizes a corpus, or finds its tokens in the cache.

    The text is split (`HeldoutSplit`), a tokenizer is trained on the training side, and both sides are encoded. The
    result lies in a folder of its own under `cache_dir`, named by the fingerprint of text and settings: changed text
    or settings make a new one. It appears there whole or not at all. A second process that asks for the same corpus
    waits for the first and uses its result. A damaged folder is logged as a warning and made again.

    Args:
      source: See `documents`.
      vocab_size: Number of tokens, the separator and 256 bytes included.
      cache_dir: Local folder, created if missing.
      text_field: See `documents`.
      heldout_fraction: About this fraction of the text is held out, between 0 and 1.
      console: Where to show progress; None shows nothing.

    Raises:
      DataError: The source can't be read, is too small for the split or the vocabulary, or changes meanwhile; or the
        cache can't be written.
    """
    settings = {
        "format": _FORMAT,
        "text": source_fingerprint(source, text_field=text_field),
        "text_field": text_field,
        "vocab_size": vocab_size,
        "heldout_fraction": heldout_fraction,
        "piece_characters": PIECE_CHARACTERS,
    }
    fingerprint = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
    folder = Path(cache_dir) / fingerprint
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{fingerprint}.lock"):
            if folder.exists() and (damage := _damage(folder, settings)):
                _logger.warning("The token cache %s is damaged and is made again: %s.", folder, damage)
                shutil.rmtree(folder)
            if not folder.exists():
                _build(folder, source, settings, console)
        return _open(folder, vocab_size, fingerprint)
    except OSError as error:
        raise DataError(
            f"{cache_dir}: the token cache must be a local folder that can be written.",
            got=f"{error}",
            fix="make room there, change its rights, or use another cache_dir.",
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("Waiting for another process that makes the same token cache.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, source: str, settings: dict[str, Any], console: Console | None) -> None:
    """Makes the folder elsewhere and renames it, so that it is never there in part."""
    # The lock keeps other processes of this host away. On a shared file system that doesn't pass locks on between
    # hosts, the host name does; whoever renames second then finds the same folder.
    building = folder.parent / f".{folder.name}.building-{socket.gethostname()}"
    shutil.rmtree(building, ignore_errors=True)  # Left by a process that was killed.
    building.mkdir()
    try:
        with Progress(console=console, disable=console is None, transient=True) as progress:
            manifest = {"settings": settings, **_tokenize(building, source, settings, progress)}
        if source_fingerprint(source, text_field=settings["text_field"]) != settings["text"]:
            raise DataError(
                f"{source}: the text must stay as it is while it is tokenized.",
                got="other content after than before",
                fix="start again once nothing writes to it.",
            )
        (building / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        try:
            building.rename(folder)
        except OSError:
            if _damage(folder, settings):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _tokenize(building: Path, source: str, settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Writes tokenizer and tokens, and returns the manifest's entries about them."""

    def read(stage: str, total: int | None = None) -> Iterator[str]:
        found = documents(source, text_field=settings["text_field"])
        return iter(progress.track(found, total=total, description=stage))

    split = HeldoutSplit.choose(read("splitting the text"), settings["heldout_fraction"])
    pieces = split.pieces(read("training the tokenizer", split.num_documents))
    tokenizer = train_tokenizer((piece.text for piece in pieces if not piece.heldout), settings["vocab_size"])
    save_tokenizer(tokenizer, building / _TOKENIZER)

    dtype = _token_dtype(settings["vocab_size"])
    num_heldout_bytes = 0
    pieces = split.pieces(read("encoding", split.num_documents))
    with open(building / _TRAIN, "wb") as train, open(building / _HELDOUT, "wb") as heldout:
        while chunk := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
            encodings = tokenizer.encode_batch_fast([piece.text for piece in chunk])
            for piece, encoding in zip(chunk, encodings, strict=True):
                ids = encoding.ids if piece.continues else [SEPARATOR_ID, *encoding.ids]
                (heldout if piece.heldout else train).write(np.asarray(ids, dtype).tobytes())
                num_heldout_bytes += len(piece.text.encode()) * piece.heldout
    files = {name: _size_and_checksum(building / name) for name in (_TOKENIZER, _TRAIN, _HELDOUT)}
    return {"num_heldout_bytes": num_heldout_bytes, "files": files}


def _damage(folder: Path, settings: dict[str, Any]) -> str | None:
    """What is wrong with a folder of the cache, or None."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["settings"] != settings:
            return f"{_MANIFEST} is of another corpus"
        for name in (_TOKENIZER, _TRAIN, _HELDOUT):
            expected, found = tuple(manifest["files"][name]), _size_and_checksum(folder / name)
            if found != expected:
                return f"{name} has size and CRC-32 {found}, not {expected}"
        int(manifest["num_heldout_bytes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _open(folder: Path, vocab_size: int, fingerprint: str) -> Corpus:
    dtype = _token_dtype(vocab_size)
    return Corpus(
        train=np.memmap(folder / _TRAIN, dtype, mode="r"),
        heldout=np.memmap(folder / _HELDOUT, dtype, mode="r"),
        num_heldout_bytes=json.loads((folder / _MANIFEST).read_text())["num_heldout_bytes"],
        vocab_size=vocab_size,
        tokenizer_path=folder / _TOKENIZER,
        fingerprint=fingerprint,
    )


def _token_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _size_and_checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum


@dataclass(frozen=True, eq=False)
class _Windows:
    """Windows of `seq_len` tokens and their targets that cover a stream; grain's random access source.

    Neighbours overlap by one token: the last target of one is the first token of the next. Where the stream doesn't
    divide, the last window is moved back to end with it, so that no token is left out.
    """

    stream: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return math.ceil((len(self.stream) - 1) / self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        start = min(index * self.seq_len, len(self.stream) - 1 - self.seq_len)
        window = self.stream[start : start + self.seq_len + 1].astype(np.int64)
        return {"tokens": window[:-1], "targets": window[1:]}


def train_loader(
    corpus: Corpus, batch_size: int, seq_len: int, seed: int, *, process_index: int = 0, process_count: int = 1
) -> "grain.MapDataset[Batch]":
    """An endless sequence of training batches: `loader[k]` is batch k, a pure function of `(corpus, seed, k)`.

    So the position in the data is one number, and resuming after k batches is going on with `loader[k]`. Every epoch
    visits every window of the stream once, in an order of its own; a batch may lie across two epochs. Reading needs
    no threads: a batch is copied out of the mapped file when it is asked for, and an error comes up right there.

    Args:
      corpus: From `prepare`.
      batch_size: Sequences in the global batch.
      seq_len: Tokens in a sequence.
      seed: Of the order, 0 to 2**32 - 1.
      process_index: This process.
      process_count: Number of processes. Process p gets the rows `p * rows` to `(p + 1) * rows` of the global batch,
        where `rows = batch_size // process_count`, and reads no others.

    Returns:
      A `grain.MapDataset`, for indexing. For an iterator with `get_state` and `set_state` use
      `iter(loader.to_iter_dataset(grain.ReadOptions(num_threads=0)))`; plain `iter(loader)` starts threads that read
      ahead.

    Raises:
      DataError: The batch can't be divided among the processes, the text is shorter than one window, or a number is
        out of range.
    """
    rows = _rows_per_process(batch_size, seq_len, process_index, process_count)
    if not 0 <= seed < 1 << 32:
        raise DataError("a data seed must be an unsigned 32-bit number.", got=f"seed={seed}", fix="use seed=0.")
    if len(corpus.train) < seq_len + 1:
        raise DataError(
            "the text to train on must fill one window of seq_len + 1 tokens.",
            got=f"{len(corpus.train)} tokens, seq_len={seq_len}",
            fix=f"use seq_len={len(corpus.train) - 1} or less, or more text.",
        )
    windows = _grain().MapDataset.source(_Windows(corpus.train, seq_len)).seed(seed).shuffle().repeat()
    # Blocks of `rows` windows are dealt out in turn, so the blocks of all processes together are one global batch.
    return windows.batch(rows, drop_remainder=True).slice(slice(process_index, None, process_count))


def heldout_batches(
    corpus: Corpus, batch_size: int, seq_len: int, *, process_index: int = 0, process_count: int = 1
) -> list[Batch]:
    """Batches that score every held-out token exactly once, but the first, which is a separator.

    All have the same shape: where the tokens don't fill the last one, its targets are `IGNORED` and its tokens
    separators.

    Args:
      corpus: From `prepare`.
      batch_size: Sequences in the global batch.
      seq_len: Tokens in a sequence. The model sees up to this many tokens of context and, on average, half as many.
      process_index: This process, which gets its rows of each batch, as in `train_loader`.
      process_count: Number of processes.

    Raises:
      DataError: The batch can't be divided among the processes, or a number is out of range.
    """
    rows = _rows_per_process(batch_size, seq_len, process_index, process_count)
    num_scored = len(corpus.heldout) - 1
    num_batches = math.ceil(num_scored / (batch_size * seq_len))
    tokens = np.full(num_batches * batch_size * seq_len, SEPARATOR_ID, np.int64)
    targets = np.full_like(tokens, IGNORED)
    tokens[:num_scored], targets[:num_scored] = corpus.heldout[:-1], corpus.heldout[1:]
    shape = "(batches processes rows seq) -> processes batches rows seq"
    sizes = {"batches": num_batches, "processes": process_count, "rows": rows}
    own_tokens, own_targets = (rearrange(x, shape, **sizes)[process_index] for x in (tokens, targets))
    return [{"tokens": x, "targets": y} for x, y in zip(own_tokens, own_targets, strict=True)]


def bits_per_byte(total_nll_nats: float, num_bytes: int) -> float:
    """Mean number of bits that the model needs for a byte of text: `total_nll_nats / (ln 2 * num_bytes)`.

    Unlike loss per token it doesn't depend on the tokenizer.

    Args:
      total_nll_nats: Sum over all scored tokens of -ln p(token | context); separators between documents count too.
      num_bytes: Bytes of that text in UTF-8.

    Raises:
      DataError: There are no bytes.

    >>> bits_per_byte(math.log(256) * 10, num_bytes=10)  # A model that knows nothing about bytes.
    8.0
    """
    if num_bytes <= 0:
        raise DataError("bits per byte need text.", got=f"num_bytes={num_bytes}", fix="score at least one byte.")
    return total_nll_nats / (math.log(2) * num_bytes)


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits per byte that `zlib -9` needs for a text: `8 * len(zlib.compress(text, 9)) / len(text)`.

    The score to beat: it knows nothing about language, but has seen the text's own beginning.

    Raises:
      DataError: The text is empty.

    >>> zlib_bits_per_byte(b"ab" * 4000) < 0.1
    True
    """
    if not text:
        raise DataError("bits per byte need text.", got="an empty text", fix="give at least one byte.")
    return 8 * len(zlib.compress(text, 9)) / len(text)


def _rows_per_process(batch_size: int, seq_len: int, process_index: int, process_count: int) -> int:
    if batch_size < 1 or seq_len < 1 or not 0 <= process_index < process_count:
        raise DataError(
            "batch_size and seq_len must be positive, and process_index one of process_count.",
            got=f"{batch_size=}, {seq_len=}, {process_index=}, {process_count=}",
            fix="correct the number.",
        )
    if batch_size % process_count:
        raise DataError(
            "every process must get the same number of sequences of the global batch.",
            got=f"batch_size={batch_size}, process_count={process_count}",
            fix=f"use a multiple of {process_count}, such as {math.ceil(batch_size / process_count) * process_count}.",
        )
    return batch_size // process_count


def _grain() -> Any:
    """`grain`, imported late because it loads jax."""
    from absl import logging as absl_logging

    # 2026-11: grain 0.2.18 warns on import that profiling of its worker processes needs jaxlib 0.11. None are started
    # here.
    logger = absl_logging.get_absl_logger()
    was_disabled, logger.disabled = logger.disabled, True
    try:
        import grain
    finally:
        logger.disabled = was_disabled
    return grain
