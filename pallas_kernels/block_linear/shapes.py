"""Named shapes of real experts and batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call. The first blocks have an owner, in turn; the rest have none.

    Attributes:
        blocks: B.
        owned: blocks with an owner.
        size: S.
        matrices: X.
        columns: O.
        depth: I.
        rows: R.
    """

    blocks: int
    owned: int
    size: int
    matrices: int
    columns: int
    depth: int
    rows: int


SHAPES = {
    # V4-Flash with 64 of its experts, 6 a token: what reads x, and what reads that.
    "v4-flash 1 x 6, gate and up": Shape(36, 28, 16, 64, 4096, 4096, 6),
    "v4-flash 1 x 6, down": Shape(36, 28, 16, 64, 4096, 2048, 576),
    "v4-flash 64 x 6, gate and up": Shape(82, 64, 128, 64, 4096, 4096, 384),
    "v4-flash 256 x 6, gate and up": Shape(136, 104, 128, 64, 4096, 4096, 1536),
    "v4-flash 256 x 6, down": Shape(136, 104, 128, 64, 4096, 2048, 17408),
    # The small V4 of configs/.
    "v4-small 512 x 1, gate and up": Shape(16, 10, 128, 8, 512, 512, 512),
}
