"""Resident memory of this process, and its peak over a stretch of work.

The peak of a whole process says little here: importing the libraries and making the weights take more than a
small update does. So the peak is sampled from when the model stands, and given above what was resident then.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory of this process that is resident now, bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class PeakMemory:
    """Samples resident memory in a thread; a context manager, used once.

    Args:
        interval_s: seconds between samples. Tensors of an update live for longer than the default.

    Attributes:
        start_bytes: resident memory when the block was entered.
        peak_bytes: largest sample.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        self.interval_s = interval_s
        self.start_bytes = self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    @property
    def above_start_bytes(self) -> int:
        """The peak above what was resident at the start, bytes."""
        return self.peak_bytes - self.start_bytes

    def __enter__(self) -> PeakMemory:
        self.start_bytes = self.peak_bytes = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
