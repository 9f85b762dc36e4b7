"""Checks and times every implementation on a GPU.

Windows must equal the reference's, at several budgets; times are those of dependent calls in one
jitted program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.top_b import pallas_triton, reference
from pallas_kernels.top_b.pallas_triton import Tuning
from pallas_kernels.top_b.shapes import SHAPES, Shape

TUNINGS = (Tuning(4, 256, 8), Tuning(8, 128, 4), Tuning(2, 256, 4))
"""Cuts tried beside the default."""


def implementations() -> dict[str, Callable[..., jax.Array]]:
    """The implementations as callers get them, the kernel's method in XLA, other cuts."""
    runs = {
        "xla sort": reference.by_sort,
        "xla ranks": reference.by_ranks,
        "triton": pallas_triton.top_b,
    }
    for tuning in TUNINGS:
        name = f"triton {tuning.requests}/{tuning.chunk}/{tuning.warps}"
        runs[name] = functools.partial(pallas_triton.top_b, tuning=tuning)
    return runs


def operands(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array]:
    """Survivals and valid prefixes."""
    random = np.random.default_rng(seed)
    size = (shape.requests, shape.depth)
    confidence = random.choice([0.5, 1.0, 0.0], size) if shape.ties else random.uniform(size=size)
    survival = np.cumprod(confidence.astype(np.float32), axis=1)
    valid = np.arange(shape.depth) < random.integers(0, shape.depth + 1, (shape.requests, 1))
    return jnp.asarray(survival), jnp.asarray(valid)


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every shape and implementation."""
    for name, shape in SHAPES.items():
        for variant, run in implementations().items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Callable[..., jax.Array], seed: int) -> Row:
    survival, valid = operands(shape, seed)
    slots = shape.requests * shape.depth
    checked, wanted = jax.jit(run), jax.jit(reference.top_b)
    failed = ""
    for budget in (0, 1, slots // 4, slots // 2, slots):
        budget = jnp.int32(budget)
        if (checked(survival, valid, budget) != wanted(survival, valid, budget)).any():
            failed = f"windows differ from the reference's at budget {budget}"

    def step(budget: jax.Array, survival: jax.Array, valid: jax.Array) -> jax.Array:
        # the budget is never negative nor raised by a window, which the compiler does not know
        survival = jnp.where(budget < 0, 0.0, survival)
        window = run(survival, valid, budget)
        return jnp.minimum(budget, budget + window[0])

    us = microseconds(lambda *_: jnp.int32(slots // 4), step, survival, valid)
    return dataclasses.asdict(shape) | {"us": us, "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
