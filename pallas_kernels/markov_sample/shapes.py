"""Named shapes of real drafters and batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A walk.

    Attributes:
        requests: S.
        vocabulary: Vd.
        rank: R.
        hidden: D.
        depth: G; positions walked.
        sampled: with noise; otherwise every request is greedy.
    """

    requests: int
    vocabulary: int
    rank: int
    hidden: int
    depth: int = 7
    sampled: bool = True


SHAPES = {
    "smollm2-135m 1": Shape(1, 49152, 64, 576),
    "smollm2-135m 64": Shape(64, 49152, 64, 576),
    "qwen3-4b 1": Shape(1, 151936, 256, 2560),
    "qwen3-4b 8": Shape(8, 151936, 256, 2560),
    "qwen3-4b 64": Shape(64, 151936, 256, 2560),
    "qwen3-4b 256": Shape(256, 151936, 256, 2560, depth=4),
    "qwen3-4b 64 greedy": Shape(64, 151936, 256, 2560, sampled=False),
    "deepseek-v4 64": Shape(64, 129280, 256, 4096, depth=5),
}
