"""Named shapes of real models and batches, shared by tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call.

    Attributes:
        tokens: T.
        heads: H.
        width: W.
        keys: entries of the first list.
        extra: entries of the second list, 0 for none.
        requests: whose tokens they are, in equal windows; 0: nobody's, and lists are unrelated.
    """

    tokens: int
    heads: int
    width: int
    keys: int
    extra: int = 0
    requests: int = 0


SHAPES = {
    # DeepSeek-V3.2: the 2048 best of the raw tokens.
    "v3.2, 1024 tokens": Shape(1024, 128, 576, 2048),
    # DeepSeek-V4: a window of 128, and the 512 (Flash) or 1024 (Pro) best compressed rows.
    "v4-flash, 1024 tokens": Shape(1024, 64, 512, 128, 512),
    "v4-pro, 1024 tokens": Shape(1024, 128, 512, 128, 1024),
    "v4-flash, 256 tokens": Shape(256, 64, 512, 128, 512),
    "v4-flash, 64 tokens": Shape(64, 64, 512, 128, 512),
    "v4-flash, 8 tokens": Shape(8, 64, 512, 128, 512),
    "v3.2, 8 tokens": Shape(8, 128, 576, 2048),
    "v3.2, 64 tokens": Shape(64, 128, 576, 2048),
    "v3.2, 1024 tokens, 64 heads": Shape(1024, 64, 576, 2048),
    "v3.2, 256 tokens": Shape(256, 128, 576, 2048),
    # V4's layers with the window alone.
    "v4-flash window, 256 tokens": Shape(256, 64, 512, 128),
}

VERIFY = {
    f"{model} verify, {requests} x {window}": Shape(
        requests * window, heads, width, keys, extra, requests
    )
    for model, heads, width, keys, extra, sizes in (
        ("v4-pro", 128, 512, 128, 1024, ((64, 4), (256, 4))),
        ("v3.2", 128, 576, 2048, 0, ((64, 4),)),
        ("v4-flash", 64, 512, 128, 512, ((32, 6), (64, 4), (64, 5), (256, 4), (256, 6))),
    )
    for requests, window in sizes
}
"""Verify windows of many requests: the tokens of one list nearly the same rows."""
