"""Ctrl-C as a flag, so that a loop on the device ends between chunks with its answers intact."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class Interrupt:
    """While entered, the first SIGINT sets ``pending``; a second one raises as usual.

    Signals can only be watched from the main thread; elsewhere, or under a handler of the
    caller's own, nothing changes.
    """

    def __init__(self) -> None:
        self.pending = False
        self._watching = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._watching:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._watching = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            signal.default_int_handler(number, frame)
        self.pending = True
