"""Named shapes of real layers, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["norm", "gated", "add"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of ``rms_linear`` (``"norm"``, ``"gated"``) or of ``linear_add`` (``"add"``).

    Attributes:
        kind: what surrounds the product.
        rows: T.
        width: numbers of an input row.
        outputs: rows of the matrix.
    """

    kind: Kind
    rows: int
    width: int
    outputs: int


_SMOLLM2: dict[str, tuple[Kind, int, int]] = {
    "qkv": ("norm", 576, 960),
    "out": ("add", 576, 576),
    "gate_up": ("gated", 576, 3072),
    "down": ("add", 1536, 576),
}

SHAPES = (
    {
        f"smollm2-135m {name} {rows}": Shape(kind, rows, width, outputs)
        for rows in (1, 8, 16)
        for name, (kind, width, outputs) in _SMOLLM2.items()
    }
    | {
        f"smollm2-135m {name} {rows}": Shape("add", rows, *_SMOLLM2[name][1:])
        for rows in (64, 128, 256)
        for name in ("out", "down")
    }
    | {
        "smollm2-135m context 8": Shape("norm", 8, 576, 384),
        "smollm2-135m block query 7": Shape("norm", 7, 576, 576),
    }
)
