"""Named shapes of real indexers, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["normal", "zeros", "recent"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        rows: T.
        entries: K.
        count: entries chosen of a row.
        kind: how scores lie: normally; mostly zero, as where no head likes a key; or rising
            towards the end.
    """

    rows: int
    entries: int
    count: int
    kind: Kind = "normal"


SHAPES = {
    "v4-flash 8 of 32k": Shape(8, 8192, 512),
    "v4-flash 256 of 32k": Shape(256, 8192, 512),
    "v4-flash 256 of 128k": Shape(256, 32768, 512),
    "v4-pro 256 of 128k": Shape(256, 32768, 1024),
    "v3.2 8 of 128k": Shape(8, 131072, 2048),
    "v3.2 64 of 32k": Shape(64, 32768, 2048),
    "v3.2 256 of 32k": Shape(256, 32768, 2048),
    "v3.2 256 of 32k zeros": Shape(256, 32768, 2048, "zeros"),
    "v3.2 256 of 32k recent": Shape(256, 32768, 2048, "recent"),
    "v3.2 256 of 128k": Shape(256, 131072, 2048),
}
