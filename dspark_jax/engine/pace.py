"""How many steps a dispatch takes: as few as keep the device busy. Host only.

A request that ends goes on holding its place until the dispatch after is over, so dispatches are
short; but the host works on each of them, and the device waits if that takes longer than its
steps.
"""

from __future__ import annotations

import math

RATE = 0.1
"""Weight of the newest dispatch in the running means."""

MARGIN = 1.5
"""Device time wanted for each second of the host's."""

MOST_STEPS = 8
"""Steps of a dispatch at most, and until times are known."""


class Pace:
    """Steps of the next dispatch."""

    def __init__(self) -> None:
        self._host: float | None = None
        self._step: float | None = None

    def worked(self, seconds: float) -> None:
        """The host was busy for so long between two dispatches."""
        self._host = _mean(self._host, seconds)

    def stepped(self, seconds: float) -> None:
        """A step took the device so long."""
        self._step = _mean(self._step, seconds)

    @property
    def steps(self) -> int:
        """Between 1 and ``MOST_STEPS``."""
        if not self._host or not self._step:
            return MOST_STEPS
        return min(max(math.ceil(MARGIN * self._host / self._step), 1), MOST_STEPS)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + RATE * (value - before)
