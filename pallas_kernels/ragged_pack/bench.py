"""Checks and times every implementation on a GPU.

All four results must equal the reference's; times are those of dependent calls in one jitted
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
from pallas_kernels.ragged_pack import pallas_triton, reference
from pallas_kernels.ragged_pack.pallas_triton import Tuning
from pallas_kernels.ragged_pack.shapes import SHAPES, Shape

TUNINGS = (Tuning(4, 1), Tuning(8, 4), Tuning(64, 4))
"""Cuts tried beside the default."""


def implementations() -> dict[str, Callable[..., tuple[jax.Array, ...]]]:
    """The implementations as callers get them, XLA's other search, other cuts."""
    runs: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
        "xla": reference.ragged_pack,
        "xla scan": functools.partial(reference.ragged_pack, search="scan"),
        "triton": pallas_triton.ragged_pack,
    }
    for tuning in TUNINGS:
        name = f"triton {tuning.requests}/{tuning.warps}"
        runs[name] = functools.partial(pallas_triton.ragged_pack, tuning=tuning)
    return runs


def operands(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, positions and counts that leave some rows free; the first request has a row."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1 << 17, (shape.requests, shape.width), np.int32)
    start = random.integers(0, 1 << 16, shape.requests, np.int32)
    count = random.integers(0, shape.width + 1, shape.requests, np.int32)
    count[0] = 1
    count[np.cumsum(count) > shape.size - 1] = 0
    return jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(count)


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every implementation, the callers' own first, and shape."""
    for variant, run in implementations().items():
        for name, shape in SHAPES.items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Callable[..., tuple[jax.Array, ...]], seed: int) -> Row:
    tokens, start, count = operands(shape, seed)
    got = jax.jit(run, static_argnums=3)(tokens, start, count, shape.size)
    want = jax.jit(reference.ragged_pack, static_argnums=3)(tokens, start, count, shape.size)
    names = ("tokens", "requests", "positions", "rows")
    wrong = [name for name, a, b in zip(names, got, want, strict=True) if (a != b).any()]

    def step(count: jax.Array, tokens: jax.Array, start: jax.Array) -> jax.Array:
        # The barrier keeps XLA from computing only what is read below, which is 0 in all; that
        # the compiler does not know.
        packed = jax.lax.optimization_barrier(run(tokens, start, count, shape.size))
        return count + sum(jnp.minimum(result.reshape(-1)[0], 0) for result in packed)

    us = microseconds(lambda *_: count, step, tokens, start)
    failed = f"{', '.join(wrong)} differ from the reference's" if wrong else ""
    return dataclasses.asdict(shape) | {"us": us, "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
