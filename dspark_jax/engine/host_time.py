"""How long the host needs for a step: what it does between two dispatches but waiting."""

from __future__ import annotations

import statistics
from collections import deque

RECENT = 15
"""Dispatches whose median counts, so that a pause changes nothing."""


class HostTime:
    """Adds up what happens between dispatches that follow on each other."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._since: float | None = None
        self._waited = 0.0

    @property
    def step(self) -> float:
        """Seconds a step, the caller's own work between dispatches included; 0 if not known."""
        return statistics.median(self._recent) if self._recent else 0.0

    def dispatched(self, now: float, steps: int) -> None:
        """A dispatch of so many steps is launched, the host being done with the one before."""
        if self._since is not None:
            self._recent.append(max(now - self._since - self._waited, 0.0) / steps)
        self._since, self._waited = now, 0.0

    def waited(self, seconds: float) -> None:
        """The device was waited for."""
        self._waited += seconds

    def idle(self) -> None:
        """There was nothing to dispatch."""
        self._since = None
