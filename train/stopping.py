"""Ctrl-C and SIGTERM as one flag: a job ends between two pieces of work, with its work kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from dspark_jax.decode.interrupt import Interrupt

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class Stopped(Exception):
    """A job was stopped from outside; what it had done is on disk.

    ``code`` is the exit code that the signal stands for.
    """

    def __init__(self, code: int) -> None:
        super().__init__("stopped")
        self.code = code


class Stop(Interrupt):
    """While entered, SIGTERM and the first SIGINT set ``pending``; a second SIGINT raises."""

    def __init__(self) -> None:
        super().__init__()
        self._terminated = False
        self._before: Any = None

    def __enter__(self) -> Self:
        super().__enter__()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *details: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        super().__exit__(*details)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.pending = self._terminated = True

    @property
    def code(self) -> int:
        """Exit code of the signal that came: 143 for SIGTERM, else 130."""
        return TERMINATED if self._terminated else INTERRUPTED

    def check(self) -> None:
        """Raise ``Stopped`` if a signal has come."""
        if self.pending:
            raise Stopped(self.code)
