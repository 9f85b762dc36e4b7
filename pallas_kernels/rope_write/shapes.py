"""Named shapes of real models and batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        rows: T.
        heads: H; 0 where only keys and values come, as in a drafter's context.
        kv_heads: N.
        head_dim: E.
        slots: S.
        capacity: K.
        normed: whether query and key heads have an RMS norm of their own.
    """

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    capacity: int
    normed: bool = False


SHAPES = {
    "smollm2-135m decode 1": Shape(1, 9, 3, 64, 1, 640),
    "smollm2-135m verify 1": Shape(8, 9, 3, 64, 1, 640),
    "smollm2-135m context 1": Shape(8, 0, 3, 64, 1, 640, normed=True),
    "smollm2-135m verify 64": Shape(512, 9, 3, 64, 64, 640),
    "smollm2-135m prefill 64": Shape(16384, 9, 3, 64, 64, 640),
    "qwen3-4b verify 8": Shape(64, 32, 8, 128, 8, 2048, normed=True),
}
