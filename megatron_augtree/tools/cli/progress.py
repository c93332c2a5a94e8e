"""What a command does for so long, on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds before anything is said, and from one sign of life to the next.
PATIENCE, EVERY = 1.0, 0.5


@contextmanager
def working(what: str) -> Iterator[None]:
    """Within this block a terminal's stderr says what is done and for how long; the line goes at its end.

    Args:
        what: such as ``planning ring``.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(what: str, ended: threading.Event) -> None:
    started, stream = time.monotonic(), sys.stderr
    if ended.wait(PATIENCE):
        return
    while True:
        stream.write(f"\r{what}: {time.monotonic() - started:.0f} s\x1b[K")
        stream.flush()
        if ended.wait(EVERY):
            stream.write("\r\x1b[K")
            stream.flush()
            return
