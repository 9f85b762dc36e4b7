"""Named shapes of real batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        requests: A.
        width: tokens of a request, at consecutive positions.
        length: rows of a ring.
        window: positions that a token sees.
    """

    requests: int
    width: int
    length: int = 143
    window: int = 128


SHAPES = {
    "deepseek-v4 decode 64": Shape(64, 1),
    "deepseek-v4 verify 32": Shape(32, 6),
    "deepseek-v4 verify 256": Shape(256, 6),
    "deepseek-v4 prefill 4": Shape(4, 2048, 2175),
}
