"""Text to train on: where it comes from, and which of it is held out."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import fsspec

from shardtorch.errors import DataError

TOPICS = "topics"
HUB_PREFIX = "hf:"
PIECE_CHARACTERS = 8192
"""Longest piece of a document that is held out or trained on as a whole, in characters."""


def documents(source: str, *, text_field: str = "text") -> Iterator[str]:
    """Reads a corpus, document by document, always in the same order.

    Nothing is skipped silently: what can't be read is an error that names the file and the place. A blank line of a
    .jsonl file holds no document.

    Args:
      source: One of
        - `"topics"`: the documentation text that ships with Python (`pydoc_data.topics`), 0.5 MB of English;
        - a file, a folder (read recursively, sorted by path; hidden files are left out) or a pattern such as
          `"books/**/*.txt"`. A .txt file is one document in UTF-8, a .jsonl file one per line, a .parquet file one
          per row. Remote ones (`"gs://bucket/books"`) go through `fsspec` and need its package for that protocol;
        - `"hf:OWNER/NAME[/SUBSET][:SPLIT]"`: a Hugging Face dataset, such as
        `"hf:roneneldan/TinyStories:train[:1%]"`;
          the split is `train` if none is given. Needs `pip install 'shardtorch[hub]'`.
      text_field: Field of a .jsonl line, or column of a .parquet file or a dataset, that holds the text.

    Returns:
      The documents. Each is valid Unicode without lone surrogates; an empty one may be among them.

    Raises:
      DataError: The source is missing, holds a file of another kind, is damaged, or holds no text at all. What
        concerns the source as a whole is raised by the call, what concerns one document while iterating.

    >>> next(documents("topics"))[:22]
    'The "assert" statement'
    """
    if source == TOPICS:
        found = _topics()
    elif source.startswith(HUB_PREFIX):
        found = _hub_documents(source, text_field)
    else:
        found = _file_documents(*_files(source), text_field)
    return _nonempty(source, found)


def source_fingerprint(source: str, *, text_field: str = "text") -> str:
    """Hash of everything that `documents` reads, 32 hex digits.

    Files are hashed by their raw bytes in reading order, much faster than parsing them; their names don't matter.

    Raises:
      DataError: As `documents`.
    """
    digest = hashlib.blake2b(digest_size=16)
    if source == TOPICS or source.startswith(HUB_PREFIX):
        for document in documents(source, text_field=text_field):
            content = document.encode()
            digest.update(b"%d:" % len(content))
            digest.update(content)
        return digest.hexdigest()
    filesystem, paths = _files(source)
    for path in paths:
        try:
            digest.update(f"{_suffix(path)}:{filesystem.size(path)}:".encode())
            with filesystem.open(path, "rb") as file:
                while chunk := cast(bytes, file.read(1 << 20)):
                    digest.update(chunk)
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()


def cut(document: str, num_characters: int = PIECE_CHARACTERS) -> list[str]:
    """Cuts a document into pieces of at most `num_characters`, at blank lines where it can.

    A piece ends after the last blank line, else the last line, else the last space in its second half, else in the
    middle of a word. Text appended to a document changes its last piece only. Joined, the pieces are the document.

    >>> [len(piece) for piece in cut("x" * 5000 + "\\n\\n" + "y" * 5000)]
    [5002, 5000]
    """
    pieces = []
    start = 0
    while len(document) - start > num_characters:
        middle, end = start + num_characters // 2, start + num_characters
        for mark in ("\n\n", "\n", " "):
            if (found := document.rfind(mark, middle, end)) >= 0:
                end = found + len(mark)
                break
        pieces.append(document[start:end])
        start = end
    return pieces + [document[start:]] * (start < len(document))


@dataclass(frozen=True)
class Piece:
    """A part of a document that lies on one side of the split."""

    text: str
    heldout: bool
    """Whether it is for evaluation only."""
    continues: bool
    """Whether the piece before it is of the same document and side, so that no separator goes between."""


@dataclass(frozen=True)
class HeldoutSplit:
    """Which pieces of a corpus are held out: those whose content hashes to at most `threshold`.

    The side of a piece depends on its own text alone. So equal texts are always on the same side, and a piece stays
    where it is when documents are added (unless the corpus was so small that a piece had to be pushed over: see
    `choose`).

    Long documents are cut into pieces first (`cut`), so a corpus of one large file has both sides too. Neighbouring
    pieces on one side stay together: context breaks only where a held-out piece was taken out.
    """

    threshold: int
    """Largest 64-bit hash that is held out."""
    num_documents: int
    """Number of documents in the corpus."""

    @classmethod
    def choose(cls, documents: Iterable[str], fraction: float) -> "HeldoutSplit":
        """Picks the threshold that holds out about a fraction of the pieces, and at least one on each side.

        If the fraction alone would leave a side empty, the piece with the smallest hash is held out, or the one with
        the largest is trained on.

        Raises:
          DataError: The fraction isn't between 0 and 1, or the corpus has fewer than two different pieces.
        """
        if not 0 < fraction < 1:
            raise DataError(
                "the held-out fraction must lie between 0 and 1.", got=f"{fraction}", fix="use 0.05 to hold out 5 %."
            )
        num_documents, smallest, largest = 0, 1 << 64, -1
        for document in documents:
            num_documents += 1
            for piece in cut(document):
                smallest, largest = min(smallest, _hash64(piece)), max(largest, _hash64(piece))
        if smallest >= largest:
            raise DataError(
                "a corpus needs two different documents at least: one to train on, one to hold out.",
                got=f"{num_documents} document(s) with {int(largest >= 0)} different text(s) "
                f"(documents over {PIECE_CHARACTERS} characters count in pieces)",
                fix="add documents, or use a longer text.",
            )
        threshold = min(max(int(fraction * (1 << 64)), smallest), largest - 1)
        return cls(threshold=threshold, num_documents=num_documents)

    def pieces(self, documents: Iterable[str]) -> Iterator[Piece]:
        """Cuts documents into pieces and tells the side of each. An empty document has none."""
        for document in documents:
            side = None
            for text in cut(document):
                heldout = _hash64(text) <= self.threshold
                yield Piece(text, heldout, continues=heldout is side)
                side = heldout


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def _nonempty(source: str, documents: Iterable[str]) -> Iterator[str]:
    holds_text = False
    for document in documents:
        holds_text = holds_text or bool(document)
        yield document
    if not holds_text:
        raise DataError(f"{source}: a corpus must hold text.", got="no document that isn't empty", fix="add text.")


def _files(source: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """The files of a source in reading order, every one of a kind that can be read."""
    try:
        filesystem, root = fsspec.url_to_fs(source)
        if "*" in root:
            folder = root.partition("*")[0].rpartition("/")[0]
            found = [path for path in filesystem.glob(root) if filesystem.isfile(path)]
        elif filesystem.isdir(root):
            folder = root.rstrip("/")
            found = filesystem.find(root)
        else:
            folder = root
            found = [root] if filesystem.exists(root) else []
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{source}: the protocol of a path must be one that fsspec can open.",
            got=f"{error}",
            fix="install the package that it asks for, or use a local path.",
        ) from error
    except OSError as error:
        raise _unreadable(source, error) from error
    # Hidden means below the folder: a corpus that lies in a hidden folder is still a corpus.
    paths = sorted(path for path in found if "/." not in path[len(folder) :])
    if not paths:
        raise DataError(
            f"{source}: a corpus must be a file or folder that exists and holds files.",
            got="no such path, or no file in it",
            fix=f"check the path; {TOPICS!r} is the built-in corpus, '{HUB_PREFIX}OWNER/NAME' a Hugging Face dataset.",
        )
    wrong = [path for path in paths if _suffix(path) not in _READERS]
    if wrong:
        raise DataError(
            f"{source}: every file of a corpus must end in one of {', '.join(_READERS)}.",
            got=f"{len(wrong)} other(s) among {len(paths)} file(s): {', '.join(wrong[:3])}",
            fix="move them away or convert them, or pick the right ones with a pattern such as 'FOLDER/**/*.txt'.",
        )
    return filesystem, paths


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return f".{name.rsplit('.', 1)[-1].lower()}" if "." in name else ""


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        f"{path}: a file of the corpus must be readable.", got=f"{error}", fix="check the path and its rights."
    )


def _file_documents(filesystem: fsspec.AbstractFileSystem, paths: list[str], text_field: str) -> Iterator[str]:
    for path in paths:
        try:
            with filesystem.open(path, "rb") as file:
                yield from _READERS[_suffix(path)](path, cast(IO[bytes], file), text_field)
        except OSError as error:
            raise _unreadable(path, error) from error


def _decode(content: bytes, path: str, offset: int = 0) -> str:
    try:
        return content.decode().removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: text must be UTF-8.",
            got=f"byte 0x{content[error.start]:02x} at offset {offset + error.start} ({error.reason})",
            fix="convert the file, for example with: iconv -f WINDOWS-1252 -t UTF-8.",
        ) from error


def _text_file(path: str, file: IO[bytes], text_field: str) -> Iterator[str]:
    yield _decode(file.read(), path)


def _jsonl_file(path: str, file: IO[bytes], text_field: str) -> Iterator[str]:
    offset = 0
    for number, content in enumerate(file, start=1):
        line = _decode(content, path, offset)
        offset += len(content)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: every line of a .jsonl file must be one JSON object.",
                got=f"{error.msg} at column {error.colno}: {line.strip()[:80]!r}",
                fix="repair or remove the line; a file cut short ends in a broken one.",
            ) from error
        fields = record if isinstance(record, dict) else {}
        yield _checked_text(fields.get(text_field), f"{path}, line {number}", text_field, list(fields))


def _parquet_file(path: str, file: IO[bytes], text_field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading .parquet needs pyarrow.", got=f"{error}", fix="pip install 'shardtorch[parquet]'."
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise _missing_field(path, text_field, columns)
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _checked_text(value, f"{path}, row {row}", text_field, columns)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: a .parquet file must be whole.", got=f"{error}", fix="write or download the file again."
        ) from error


_READERS: dict[str, Callable[[str, IO[bytes], str], Iterator[str]]] = {
    ".txt": _text_file,
    ".jsonl": _jsonl_file,
    ".parquet": _parquet_file,
}


def _hub_documents(source: str, text_field: str) -> Iterator[str]:
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise DataError(
            "a Hugging Face dataset is named 'hf:OWNER/NAME[/SUBSET][:SPLIT]'.",
            got=source,
            fix="for example 'hf:roneneldan/TinyStories' or 'hf:Salesforce/wikitext/wikitext-2-raw-v1:train'.",
        )
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"{source}: a Hugging Face dataset needs the package `datasets`.",
            got=f"{error}",
            fix="pip install 'shardtorch[hub]'.",
        ) from error
    try:
        dataset = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")
    except Exception as error:  # `datasets` passes on what its many back ends raise; the cause is kept.
        raise DataError(
            f"{source}: the dataset must exist and load.",
            got=f"{type(error).__name__}: {error}",
            fix="check owner, name, subset, split and network; a private dataset needs `hf auth login`.",
        ) from error
    if text_field not in dataset.column_names:
        raise _missing_field(source, text_field, dataset.column_names)
    return (
        _checked_text(row[text_field], f"{source}, row {number}", text_field, dataset.column_names)
        for number, row in enumerate(dataset.select_columns([text_field]), start=1)
    )


def _missing_field(where: str, text_field: str, fields: list[str]) -> DataError:
    return DataError(
        f"{where}: the text field must be one of those that are there.",
        got=f"text_field={text_field!r}, but the fields are {fields}",
        fix="set text_field to the one that holds the text.",
    )


def _checked_text(value: Any, where: str, text_field: str, fields: list[str]) -> str:
    """The value as text that has a UTF-8 form."""
    if text_field not in fields:
        raise _missing_field(where, text_field, fields)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {text_field!r} must be text.",
            got=f"{type(value).__name__} {str(value)[:80]}",
            fix="remove the record, or set text_field to the field that holds the text.",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: text must be valid Unicode.",
            got=f"the lone surrogate {value[error.start]!r} at character {error.start}",
            fix="repair the record: an escape such as \\ud83d must come with its second half.",
        ) from error
    return value
