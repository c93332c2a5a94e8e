"""Group files, and what is done to groups before a tree is built. Standard library only.

A group file is JSON lines in UTF-8, plain or gzip (name ends in ``.gz``), one group a line::

    {"group": "a", "prompt": [5, 9, 2], "responses": [{"tokens": [7, 1], "loss_mask": [1, 1], "reward": 1.0}]}
    {"prompt": "What is 2+2?", "responses": [{"text": "4", "reward": 1}, {"text": "5", "reward": 0}]}

The second form is text: a tokenizer turns it into tokens, and each response ends with ``end_of_text``.
A file may mix both, a group may not. Optional fields: ``group`` (default ``line-N``) and ``salt`` (of the
prompt) of a group; ``loss_mask`` (default all 1), ``reward``, ``advantage``, ``old_logprobs``,
``ref_logprobs`` and ``salt`` of a response. Lists of a response have one entry a token.

Invariants, each a test: what was written is read back unchanged, floats to the last bit; a line that
breaks a rule is an ``InputError`` that names file, line and field; messages hold no token ids and no text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from megatron_augtree.config import InputError
from megatron_augtree.data.parsing import parse_group
from megatron_augtree.data.records import PER_TOKEN, Group, Response
from megatron_augtree.data.tokenizer import Tokenizer

__all__ = [
    "Group", "Response", "check_vocabulary", "fingerprint", "fold", "parse_range", "read_groups", "truncate",
    "write_groups",
]

_BOM = b"\xef\xbb\xbf"


def read_groups(
    path: str | os.PathLike[str],
    start: int = 0,
    stop: int | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> list[Group]:
    """Groups ``start`` to ``stop - 1`` of a group file, counted from 0; blank lines do not count.

    Args:
        path: the file.
        start: first group.
        stop: one past the last group; None reads to the end.
        tokenizer: encodes text groups; default one token a byte.

    Returns:
        At least one group, and all that were asked for.

    Raises:
        InputError: the file cannot be read, a line of the range breaks a rule (others are not looked
            into), or the range reaches beyond the file.
    """
    name = os.fspath(path)
    if start < 0 or (stop is not None and stop <= start):
        raise InputError("the range selects no group", values=f"{name}: groups {_range_text(start, stop)}",
                         rule="0 <= first < end", remedy="correct the range")
    groups: list[Group] = []
    count = 0
    for number, line in _lines(name):
        if count >= start:
            groups.append(parse_group(line, name, number, tokenizer))
        count += 1
        if count == stop:
            break
    if not groups or (stop is not None and count < stop):
        raise InputError(
            "the file has too few groups",
            values=f"{name}: {count} groups, asked for {_range_text(start, stop)}",
            rule="the range lies within the file, and the file has a group",
            remedy="correct the range" if count else "use another file")
    return groups


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; no byte-order mark, no line ends."""
    number = 0
    try:
        with gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if line:
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError("a gzip file is damaged", values=f"{name}: after line {number}: {error}",
                         rule="a name that ends in .gz is a whole gzip file",
                         remedy="fetch or write the file again, or rename a plain file") from error
    except OSError as error:
        raise InputError("a group file cannot be read", values=f"{name}: {error.strerror}",
                         rule="the path is a readable file", remedy="correct the path") from error


def parse_range(text: str, flag: str = "--groups") -> tuple[int, int | None]:
    """``"2:5"`` -> ``(2, 5)``; ``"2:"`` -> ``(2, None)``; ``":5"`` -> ``(0, 5)``; ``":"`` -> ``(0, None)``.

    Raises:
        InputError: another form, or a range that is empty.
    """
    match = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", text.strip())
    start, stop = (int(match[1] or 0), int(match[2]) if match[2] else None) if match else (0, 0)
    if stop is not None and stop <= start:
        raise InputError("cannot read a range of groups", values=f"{flag} {text!r}",
                         rule="A:B, groups A to B-1 counted from 0, with A < B; a side left out means the "
                         "file's first or last group", remedy="correct the flag, for example 0:4")
    return start, stop


def _range_text(start: int, stop: int | None) -> str:
    return f"{start}:{'' if stop is None else stop}"


def write_groups(path: str | os.PathLike[str], groups: Iterable[Group]) -> None:
    """Writes a group file, gzip if the name ends in ``.gz``; other processes see the old file or the new.

    The same groups give the same bytes.

    Raises:
        InputError: the folder does not exist or cannot be written.
    """
    target = os.path.realpath(path)  # through a link, so that the link stays
    folder, base = os.path.split(target)
    # in the same folder, hence on the same file system, where a rename is atomic
    partial = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with open(partial, "xb") as file:
                if base.endswith(".gz"):
                    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                        _write_lines(packed, groups)
                else:
                    _write_lines(file, groups)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            raise
    except OSError as error:
        raise InputError("a group file cannot be written", values=f"{os.fspath(path)}: {error.strerror}",
                         rule="the path is a file in a folder that exists and can be written",
                         remedy="correct the path, or make the folder") from error


def _write_lines(file: IO[bytes], groups: Iterable[Group]) -> None:
    for group in groups:
        line = json.dumps(_plain(group), separators=(",", ":"), allow_nan=False)
        file.write(line.encode("ascii") + b"\n")


def _plain(group: Group) -> dict[str, Any]:
    """The group as JSON has it; optional fields only where they are given."""
    line: dict[str, Any] = {"group": group.name, "prompt": group.prompt}
    if group.prompt_salt is not None:
        line["salt"] = group.prompt_salt
    line["responses"] = responses = []
    for response in group.responses:
        item: dict[str, Any] = {"tokens": response.tokens, "loss_mask": list(map(int, response.loss_mask))}
        for field in ("reward", "advantage", "salt"):
            if getattr(response, field) is not None:
                item[field] = getattr(response, field)
        for field in ("old_logprobs", "ref_logprobs"):
            values = getattr(response, field)
            if values is not None:
                item[field] = [None if math.isnan(value) else value for value in values]
        responses.append(item)
    return line


def fold(groups: Sequence[Group], vocab_size: int) -> list[Group]:
    """Groups with every id taken ``% vocab_size``.

    Fold before the tree is built: folding may make prefixes equal that were not.

    Raises:
        InputError: ``vocab_size`` is not positive.
    """
    if vocab_size < 1:
        raise InputError("a vocabulary is empty", values=f"vocab_size {vocab_size}",
                         rule="a vocabulary has a token", remedy="correct the vocabulary's size")

    def folded(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(token % vocab_size for token in tokens)

    return [
        replace(group, prompt=folded(group.prompt),
                responses=tuple(replace(item, tokens=folded(item.tokens)) for item in group.responses))
        for group in groups
    ]


def check_vocabulary(groups: Sequence[Group], vocab_size: int) -> None:
    """Fail where a model has no embedding for a token.

    Raises:
        InputError: names the first group with an id of ``vocab_size`` or more.
    """
    for group in groups:
        tokens = [*group.prompt, *(token for response in group.responses for token in response.tokens)]
        beyond = sum(token >= vocab_size for token in tokens)
        if beyond:
            raise InputError(
                "a token is not of the vocabulary",
                values=f"group {group.name}: {beyond} of {len(tokens)} ids, --vocab-size {vocab_size}",
                rule="ids are 0..vocab_size-1 (257 for ByteTokenizer)",
                remedy="raise --vocab-size, or try --fold-token-ids")


def truncate(
    groups: Sequence[Group], max_prompt_tokens: int | None = None, max_response_tokens: int | None = None
) -> list[Group]:
    """Groups with the first tokens of every prompt and response, and the per-token lists cut alike.

    Log-probs are kept as they are: after a cut prompt they belong to another context.

    Args:
        groups: the groups.
        max_prompt_tokens: at least 1; None keeps all.
        max_response_tokens: at least 0; None keeps all.

    Raises:
        InputError: a limit that is too small.
    """
    for flag, limit, least in (("--max-prompt-tokens", max_prompt_tokens, 1),
                               ("--max-response-tokens", max_response_tokens, 0)):
        if limit is not None and limit < least:
            raise InputError("a limit is too small", values=f"{flag} {limit}",
                             rule=f"{flag} is at least {least}",
                             remedy="raise the limit, or leave the flag out")

    def cut(response: Response) -> Response:
        lists = {field: getattr(response, field) for field in ("tokens", *PER_TOKEN)}
        given = {field: values for field, values in lists.items() if values is not None}
        return replace(response, **{field: values[:max_response_tokens] for field, values in given.items()})

    return [
        replace(group, prompt=group.prompt[:max_prompt_tokens],
                prompt_salt=None if group.prompt_salt is None else group.prompt_salt[:max_prompt_tokens],
                responses=tuple(map(cut, group.responses)))
        for group in groups
    ]


def fingerprint(groups: Sequence[Group]) -> str:
    """SHA-256, in hex, of all that the update depends on; ranks that were given different data differ in it.

    Covers the order of groups and responses, tokens, masks, salts, rewards, advantages and log-probs;
    not the names, which only messages use.
    """
    digest = hashlib.sha256()

    def add(kind: str, values: Sequence[float] | None) -> None:
        # every list is preceded by its length, -1 for None: no two sets of groups give the same bytes
        digest.update(struct.pack("<q", -1 if values is None else len(values)))
        digest.update(struct.pack(f"<{len(values or ())}{kind}", *values or ()))

    def add_floats(values: Sequence[float] | None) -> None:
        # one bit pattern for the many NaNs
        add("d", values and [math.nan if math.isnan(value) else value for value in values])

    digest.update(struct.pack("<q", len(groups)))
    for group in groups:
        add("q", group.prompt)
        add("q", group.prompt_salt)
        digest.update(struct.pack("<q", len(group.responses)))
        for response in group.responses:
            add("q", response.tokens)
            add("?", response.loss_mask)
            add("q", response.salt)
            for number in (response.reward, response.advantage):
                add_floats(None if number is None else (number,))
            add_floats(response.old_logprobs)
            add_floats(response.ref_logprobs)
    return digest.hexdigest()
