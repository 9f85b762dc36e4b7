"""Checks and times every implementation on a GPU.

Results of owned blocks are checked against the reference. Times are those of dependent calls in
one jitted program; the floor is the larger of the matrices, rows and results at 4.3 TB/s and the
product at 790 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.block_linear import pallas_triton, reference
from pallas_kernels.block_linear.pallas_triton import Tuning
from pallas_kernels.block_linear.shapes import SHAPES, Shape

BYTES_PER_US = 4.3e6
OPERATIONS_PER_US = 790e6
TOLERANCE = 0.01
TUNINGS = (Tuning(4, 3), Tuning(8, 4))
"""Cuts tried beside the default."""

Call = Callable[..., jax.Array]
Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def operands(shape: Shape, seed: int) -> Operands:
    """Random rows and matrices; a row in eight is none."""
    random = np.random.default_rng(seed)
    one, two = jax.random.split(jax.random.key(seed, impl="rbg"))
    row = random.integers(0, shape.rows * 8 // 7 + 1, (shape.blocks, shape.size))
    owner = np.arange(shape.blocks) * shape.matrices // shape.owned
    owner[shape.owned :] = shape.matrices
    matrices = jax.random.normal(two, (shape.matrices, shape.columns, shape.depth), jnp.bfloat16)
    return (
        jax.random.normal(one, (shape.rows, shape.depth), jnp.bfloat16),
        jnp.asarray(row, jnp.int32),
        matrices * shape.depth**-0.5,
        jnp.asarray(owner, jnp.int32),
    )


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every implementation, the callers' own first, and shape."""
    runs: dict[str, Call] = {
        "triton": pallas_triton.block_linear,
        "xla": reference.block_linear,
    }
    for tuning in TUNINGS:
        name = f"triton {tuning.warps}/{tuning.stages}"
        runs[name] = functools.partial(pallas_triton.block_linear, tuning=tuning)
    for variant, run in runs.items():
        for name, shape in SHAPES.items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Call, seed: int) -> Row:
    case = operands(shape, seed)
    got, want = jax.jit(run)(*case), jax.jit(reference.block_linear)(*case)
    got, want = (one[: shape.owned].astype(jnp.float32) for one in (got, want))
    error = float((jnp.abs(got - want) / jnp.maximum(jnp.abs(want), 1.0)).max())

    def step(x: jax.Array, row: jax.Array, matrices: jax.Array, owner: jax.Array) -> jax.Array:
        # The barrier keeps XLA from computing only what is read below, which is too small to tell.
        out = jax.lax.optimization_barrier(run(x, row, matrices, owner))
        return x + 1e-9 * out[0, 0, 0]

    us = microseconds(
        lambda x, *_: x, lambda x, _, *rest: step(x, *rest), *case, calls=2, repeats=4
    )
    used = min(shape.owned, shape.matrices)
    moved = 2 * (
        used * shape.columns * shape.depth
        + shape.rows * shape.depth
        + shape.owned * shape.size * shape.columns
    )
    work = 2 * shape.owned * shape.size * shape.columns * shape.depth
    floor = max(moved / BYTES_PER_US, work / OPERATIONS_PER_US)
    note = f"floor {floor:.1f} us, error {error:.0e}"
    # written so that NaN fails
    failed = "" if error < TOLERANCE else f"error not below {TOLERANCE}"
    return dataclasses.asdict(shape) | {"us": us, "floor_us": floor, "note": note, "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))
