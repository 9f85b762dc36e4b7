"""Named shapes of real batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses

from pallas_kernels.kv_quant.layouts import V3_2, V4, Layout


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        layout: of a row.
        rows: T.
        pages: N.
        page_size: rows of a page.
    """

    layout: Layout
    rows: int
    pages: int = 1024
    page_size: int = 64


SHAPES = {
    "v3.2 64": Shape(V3_2, 64),
    "v3.2 1536": Shape(V3_2, 1536),
    "v3.2 16384": Shape(V3_2, 16384),
    "v4 64": Shape(V4, 64),
    "v4 1536": Shape(V4, 1536),
    "v4 16384": Shape(V4, 16384),
    "v4 pages of two rows 384": Shape(V4, 384, pages=16384, page_size=2),
}
