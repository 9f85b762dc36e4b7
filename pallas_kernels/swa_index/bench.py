"""Checks and times every implementation on a GPU.

Rows and counts must equal the reference's; times are those of dependent calls in one jitted
program, each with one small operation that passes the dependence on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.swa_index import pallas_triton, reference
from pallas_kernels.swa_index.pallas_triton import Tuning
from pallas_kernels.swa_index.shapes import SHAPES, Shape

TUNINGS = (Tuning(1, 1), Tuning(4, 1), Tuning(16, 4))
"""Cuts tried beside the default."""

Run = Callable[..., tuple[jax.Array, jax.Array]]


def implementations() -> dict[str, Run]:
    """The implementations as callers get them, and other cuts."""
    runs: dict[str, Run] = {"xla": reference.swa_index, "triton": pallas_triton.swa_index}
    for tuning in TUNINGS:
        name = f"triton {tuning.tokens}/{tuning.warps}"
        runs[name] = functools.partial(pallas_triton.swa_index, tuning=tuning)
    return runs


def operands(shape: Shape, seed: int) -> tuple[jax.Array, ...]:
    """Position, request, ring and origin; some tokens are padding, the first one is not."""
    random = np.random.default_rng(seed)
    requests, width = shape.requests, shape.width
    start = random.integers(0, 1000, requests, np.int32)
    request = np.repeat(np.arange(requests, dtype=np.int32), width)
    position = start[request] + np.tile(np.arange(width, dtype=np.int32), requests)
    padding = random.uniform(size=request.size) < 0.1
    padding[0] = False
    ring = random.permutation(2 * requests)[:requests].astype(np.int32)
    ring[1:] = np.where(random.uniform(size=requests - 1) < 0.1, -1, ring[1:])
    origin = start - (shape.window - 1) if width > 16 else np.zeros_like(start)
    return (
        jnp.asarray(np.where(padding, -1, position)),
        jnp.asarray(np.where(padding, requests, request)),
        jnp.asarray(ring),
        jnp.asarray(origin),
    )


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every implementation, the callers' own first, and shape."""
    for variant, run in implementations().items():
        for name, shape in SHAPES.items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Run, seed: int) -> Row:
    case = operands(shape, seed)
    run = functools.partial(run, window=shape.window, length=shape.length)
    wanted = functools.partial(reference.swa_index, window=shape.window, length=shape.length)
    got, want = jax.jit(run)(*case), jax.jit(wanted)(*case)
    wrong = any((a != b).any() for a, b in zip(got, want, strict=True))

    def step(tokens: tuple[jax.Array, jax.Array], *rings: jax.Array) -> tuple[jax.Array, ...]:
        # The barrier keeps XLA from computing only what is read below, which is 0 in all; that
        # the compiler does not know.
        listed, count = jax.lax.optimization_barrier(run(*tokens, *rings))
        link = jnp.minimum(listed[0, 0], 0) + jnp.minimum(count[0], 0)
        return tuple(token + link for token in tokens)

    us = microseconds(lambda *_: case[:2], step, *case[2:])
    failed = "rows or counts differ from the reference's" if wrong else ""
    return dataclasses.asdict(shape) | {"us": us, "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
