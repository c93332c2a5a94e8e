"""Tokenizers that need no files: one token a byte, or none for files of ids. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_augtree.config import InputError


class Tokenizer(Protocol):
    """What reading text groups needs of a tokenizer.

    Attributes:
        vocab_size: ids are 0..vocab_size-1.
        end_of_text: id that ends every response.
    """

    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ``text``, without ``end_of_text``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; ``end_of_text`` stands for nothing."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8, 256 ends a response."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> tuple[int, ...]:
        """``"4"`` -> ``(52,)``.

        Raises:
            UnicodeEncodeError: ``text`` holds half of a surrogate pair, which UTF-8 cannot express.
        """
        return tuple(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """``(52, 256)`` -> ``"4"``; bytes that are not UTF-8 become replacement characters.

        Raises:
            InputError: an id that is not of this vocabulary.
        """
        foreign = sum(not 0 <= token < self.vocab_size for token in tokens)
        if foreign:
            raise InputError(
                "a token is not of the byte vocabulary",
                values=f"{foreign} of {len(tokens)} ids",
                rule=f"ids are 0..{self.vocab_size - 1}",
                remedy="decode with the tokenizer that made the tokens, or fold them first",
            )
        return bytes(token for token in tokens if token != self.end_of_text).decode("utf-8", "replace")


class NullTokenizer:
    """For files of token ids: text is an error."""

    vocab_size = 1 << 62
    end_of_text = 0

    def encode(self, text: str) -> Sequence[int]:
        """Refuses; the reader adds file, line and field.

        Raises:
            InputError: always.
        """
        raise InputError(
            "text where token ids are expected",
            values="a string",
            rule="--tokenizer-type NullTokenizer reads token ids only",
            remedy="use --tokenizer-type ByteTokenizer",
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The ids as text."""
        return " ".join(map(str, tokens))


#: ``--tokenizer-type`` -> tokenizer.
TOKENIZERS: dict[str, type[Tokenizer]] = {"NullTokenizer": NullTokenizer, "ByteTokenizer": ByteTokenizer}
