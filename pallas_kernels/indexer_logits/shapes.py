"""Named shapes of real indexers, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: every request has a full window, at the end of its keys.

    Attributes:
        requests: A.
        window: W.
        entries: K.
        page_size: P; ``entries`` where a request is one page.
        heads: J.
        width: I.
    """

    requests: int
    window: int
    entries: int
    page_size: int = 64
    heads: int = 64
    width: int = 128


SHAPES = {
    "v4 8 x 6 of 32k": Shape(8, 6, 8192),
    "v4 64 x 4 of 32k": Shape(64, 4, 8192),
    "v4 64 x 4 of 128k": Shape(64, 4, 32768),
    "v4 1 x 2048 of 32k": Shape(1, 2048, 8192),
    "v3.2 8 x 6 of 32k": Shape(8, 6, 32768),
    "v3.2 64 x 1 of 32k": Shape(64, 1, 32768),
    "v3.2 64 x 6 of 32k": Shape(64, 6, 32768),
    "v3.2 64 x 6 of 32k, one page": Shape(64, 6, 32768, page_size=32768),
}
