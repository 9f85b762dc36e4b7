"""Named shapes of real batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        requests: S.
        width: W.
        size: T.
    """

    requests: int
    width: int
    size: int


SHAPES = {
    "32 x 8 in 128": Shape(32, 8, 128),
    "64 x 6 in 256": Shape(64, 6, 256),
    "256 x 8 in 1024": Shape(256, 8, 1024),
    "1024 x 8 in 4096": Shape(1024, 8, 4096),
}
