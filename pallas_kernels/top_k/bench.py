"""Checks and times every implementation on a GPU.

Positions must equal the sort's. Times are those of dependent calls in one jitted program; the
floor is the time to read the scores once at 4.3 TB/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.top_k import pallas_triton, reference
from pallas_kernels.top_k.pallas_triton import Tuning
from pallas_kernels.top_k.shapes import SHAPES, Shape

BYTES_PER_US = 4.3e6
TUNINGS = (Tuning(tile=2048, warps=4), Tuning(tile=8192, warps=8), Tuning(least_kept=8192))
"""Cuts tried beside the default."""
TUNED = ("v4-flash 256 of 128k", "v3.2 8 of 128k")
"""Shapes that they are tried on: each compiles for seconds."""

Call = Callable[..., jax.Array]


def plain_top_k(scores: jax.Array, seen: jax.Array, count: int) -> jax.Array:
    """XLA's top-k alone, neither masked nor ordered: the least that it can take."""
    return jax.lax.top_k(scores, min(count, scores.shape[1]))[1].astype(jnp.int32)


def operands(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array]:
    """Scores, and how many of each row are seen: nearly all, as in the last rows of a text."""
    one, two = jax.random.split(jax.random.key(seed))
    scores = jax.random.normal(one, (shape.rows, shape.entries))
    if shape.kind == "zeros":
        scores = jnp.where(scores > 2.2, scores, 0.0)
    if shape.kind == "recent":
        scores += jnp.linspace(0.0, 8.0, shape.entries) ** 2
    seen = jax.random.randint(two, (shape.rows,), shape.entries - 64, shape.entries + 1)
    return scores, seen


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every shape and implementation."""
    runs: dict[str, Call] = {
        "triton": pallas_triton.top_k,
        "xla": reference.top_k,
        "xla top_k alone": plain_top_k,
    }
    cuts: dict[str, Call] = {
        f"triton {one.tile}/{one.least_kept}/{one.warps}": functools.partial(
            pallas_triton.top_k, tuning=one
        )
        for one in TUNINGS
    }
    for name, shape in SHAPES.items():
        for variant, run in (runs | (cuts if name in TUNED else {})).items():
            yield name, variant, functools.partial(_measure, shape, variant, run, seed)


def _measure(shape: Shape, variant: str, run: Call, seed: int) -> Row:
    scores, seen = operands(shape, seed)
    failed = ""
    if variant.startswith("triton"):
        got, wanted = (
            jax.jit(call, static_argnums=2)(scores, seen, shape.count)
            for call in (run, reference.top_k)
        )
        wrong = int((got != wanted).any(axis=1).sum())
        failed = f"{wrong} of {shape.rows} rows differ from the sort's" if wrong else ""

    def step(seen: jax.Array, scores: jax.Array) -> jax.Array:
        if variant == "xla top_k alone":  # the others read `seen`, and cannot leave the loop
            scores = jnp.where(seen[:, None] < 0, 0.0, scores)
        best = run(scores, seen, shape.count)
        # positions are never below -1, which the compiler does not know
        return jnp.minimum(seen, seen + best[:, 0] + 1)

    calls, repeats = (8, 4) if variant.startswith("triton") else (1, 4)
    us = microseconds(lambda _: seen, step, scores, calls=calls, repeats=repeats)
    floor = 4 * shape.rows * shape.entries / BYTES_PER_US
    note = f"floor {floor:.1f} us"
    return dataclasses.asdict(shape) | {
        "us": us,
        "floor_us": floor,
        "note": note,
        "failed": failed,
    }


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
