"""Named shapes of real batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        requests: S.
        depth: G.
        ties: survivals take a few values alone, as those of a drafter that is sure of itself.
    """

    requests: int
    depth: int
    ties: bool = False


SHAPES = {
    "64 x 7": Shape(64, 7),
    "256 x 7": Shape(256, 7),
    "256 x 7 ties": Shape(256, 7, ties=True),
    "1024 x 7": Shape(1024, 7),
    "1024 x 15": Shape(1024, 15),
}
