"""Files that commands write: whole or not at all, with an error that names the flag."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_augtree.config import InputError


@contextmanager
def written(target: str, flag: str) -> Iterator[Path]:
    """A path to write to, which takes the target's place where the block ends well.

    It has the target's ending, by which a writer may know the format.

    Raises:
        InputError: the folder does not exist or cannot be written.
    """
    final = Path(target)
    partial = final.with_name(f".{secrets.token_hex(4)}.{final.name}")
    try:
        try:
            yield partial
            os.replace(partial, final)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError("a file cannot be written", values=f"{flag} {target}: {error.strerror}",
                         rule="the path is a file in a folder that exists and can be written",
                         remedy="correct the path, or make the folder") from error
