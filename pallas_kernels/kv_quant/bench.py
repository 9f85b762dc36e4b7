"""Checks and times every implementation on a GPU.

Pools must equal the reference's to the last byte, rows that write nothing among them. Times are
those of dependent calls in one jitted program that hand the pool on; each makes its rows first, in
one operation that XLA may fuse with what follows and the kernel reads from memory, as in a model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.kv_quant import pallas_triton, reference
from pallas_kernels.kv_quant.pallas_triton import Tuning
from pallas_kernels.kv_quant.shapes import SHAPES, Shape

TUNINGS = (Tuning(1, 1), Tuning(1, 4), Tuning(4, 4))
"""Ways of dealing rows tried beside the default."""


def implementations() -> dict[str, Callable[..., jax.Array]]:
    """The implementations as callers get them, then other ways to deal the rows."""
    runs: dict[str, Callable[..., jax.Array]] = {
        "xla": reference.write,
        "triton": pallas_triton.write,
    }
    for tuning in TUNINGS:
        name = f"triton {tuning.rows}/{tuning.warps}"
        runs[name] = functools.partial(pallas_triton.write, tuning=tuning)
    return runs


def operands(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A pool of zeros, slots scattered over it (some outside, not its last one), and rows."""
    random = np.random.default_rng(seed)
    slots = random.permutation(shape.pages * shape.page_size - 1)[: shape.rows]
    slots[:2] = -1, shape.pages * shape.page_size
    values = jax.random.normal(jax.random.key(seed), (shape.rows, shape.layout.width))
    pool = reference.empty_pages(shape.pages, shape.page_size, shape.layout)
    return pool, jnp.asarray(slots, jnp.int32), (values * 3).astype(jnp.bfloat16)


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every implementation, the callers' own first, and shape."""
    for variant, run in implementations().items():
        for name, shape in SHAPES.items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Callable[..., jax.Array], seed: int) -> Row:
    case = operands(shape, seed)
    layout = {"layout": shape.layout, "page_size": shape.page_size}
    run = functools.partial(run, **layout)
    want = jax.jit(functools.partial(reference.write, **layout))(*case)
    wrong = int((jax.jit(run)(*case) != want).sum())

    def begin(*_: jax.Array) -> jax.Array:
        return reference.empty_pages(shape.pages, shape.page_size, shape.layout)

    def step(pool: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
        # The pool's last byte stays 0, which the compiler does not know. The barrier keeps its
        # reading out of the write, which could not be in place otherwise.
        last = jax.lax.optimization_barrier(pool.reshape(-1)[-1])
        return run(pool, slots, values + last.astype(values.dtype))

    us = microseconds(begin, step, *case[1:])
    failed = f"{wrong} bytes differ from the reference's" if wrong else ""
    fields = dataclasses.asdict(shape) | {"layout": shape.layout.row_bytes}
    return fields | {"us": us, "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
