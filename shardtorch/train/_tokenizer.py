"""A byte-level BPE tokenizer, trained on the corpus: every text has tokens, and they give it back exactly."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardtorch.errors import DataError

SEPARATOR = "<|endoftext|>"
SEPARATOR_ID = 0
"""Token that stands before every document."""
MIN_VOCAB_SIZE = 257
"""The separator and one token for each byte."""


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer (GPT-2's: https://openai.com/research/better-language-models).

    The same documents give the same tokenizer, and `decode(encode(text).ids) == text` for every text. A separator
    that is spelled out in a text is encoded as ordinary text: only a caller puts `SEPARATOR_ID` between documents.

    Args:
      documents: Text to learn merges from. Don't include held-out text.
      vocab_size: Number of tokens, `MIN_VOCAB_SIZE` at least: the separator (id 0), 256 bytes, then merges.

    Raises:
      DataError: The vocabulary is too small for all bytes, or the text is too short to fill it.

    >>> tokenizer = train_tokenizer(["low lower lowest"], vocab_size=260)
    >>> tokenizer.encode("lower <|endoftext|>").tokens[:3], tokenizer.decode(tokenizer.encode("naïve").ids)
    (['low', 'e', 'r'], 'naïve')
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            "a byte-level vocabulary must hold 256 bytes and the separator.",
            got=f"vocab_size={vocab_size}",
            fix=f"use vocab_size={MIN_VOCAB_SIZE} or more.",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (reached := tokenizer.get_vocab_size()) < vocab_size:
        raise DataError(
            "the text must be long enough to fill the vocabulary.",
            got=f"{reached} tokens from all of it, where vocab_size={vocab_size}",
            fix=f"use vocab_size={reached} or less, or more text.",
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Writes a tokenizer in the JSON format of `tokenizers`; the file is either whole or not there."""
    path = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(tokenizer.to_str())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads what `save_tokenizer` wrote.

    Raises:
      DataError: There is no such file, or it holds no tokenizer, or one whose separator isn't token 0.
    """
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # `tokenizers` raises plain Exception for a missing and for a damaged file.
        raise DataError(
            f"{path}: a tokenizer file must be there and whole.",
            got=f"{error}",
            fix="check the path; a tokenizer in the token cache is made again if you delete its folder.",
        ) from error
    if tokenizer.token_to_id(SEPARATOR) != SEPARATOR_ID:
        raise DataError(
            f"{path}: {SEPARATOR!r} must be token {SEPARATOR_ID}.",
            got=f"token {tokenizer.token_to_id(SEPARATOR)}",
            fix="use a tokenizer that shardtorch trained.",
        )
    tokenizer.encode_special_tokens = True  # Not part of the file: tokenizers 0.23.
    return tokenizer
