"""Named shapes of real heads, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        rows: T.
        width: I, numbers of an input row.
        outputs: V.
        rank: R of the second product, 0 without one.
    """

    rows: int
    width: int
    outputs: int
    rank: int = 0


_ROWS = (8192, 64, 512, 1024, 128, 1, 8, 2048)

SHAPES = (
    {f"smollm2-135m draft {rows}": Shape(rows, 576, 49152, 64) for rows in _ROWS}
    | {f"qwen3-4b draft {rows}": Shape(rows, 2560, 151936, 256) for rows in (64, 512)}
    | {f"smollm2-135m verify {rows}": Shape(rows, 576, 49152) for rows in _ROWS}
)
