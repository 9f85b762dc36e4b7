"""Named shapes of real models and batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        requests: A, and S as well.
        width: W, query rows of a request.
        heads: H.
        kv_heads: N.
        head_dim: E.
        capacity: K, cache rows of a slot.
        context: mean live rows of a request.
    """

    requests: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    context: int


SHAPES = {
    "smollm2-135m decode 1024": Shape(1024, 1, 9, 3, 64, 768, 400),
    "smollm2-135m verify 1": Shape(1, 8, 9, 3, 64, 2048, 1900),
    "smollm2-135m verify 64": Shape(64, 8, 9, 3, 64, 1024, 512),
    "smollm2-135m decode 1": Shape(1, 1, 9, 3, 64, 2048, 1900),
    "smollm2-135m verify 1, short": Shape(1, 8, 9, 3, 64, 512, 256),
    "smollm2-135m verify 1024": Shape(1024, 8, 9, 3, 64, 768, 400),
    "qwen3-4b verify 64": Shape(64, 8, 32, 8, 128, 2048, 1024),
}

SWEPT = ("smollm2-135m decode 1024", "smollm2-135m verify 1", "smollm2-135m verify 64")
"""Shapes the kernel is tuned for."""
