"""Products of blocks on the tensor cores, every matrix read where it lies.

A program makes 128 columns of a block. Where blocks are small the matrix is the left side of the
product, so that it fills the height of the tensor cores' tiles and the rows only their width.
Pallas' Triton lowering is deprecated in JAX; the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import empty

SIZES = (16, 32, 64, 128)
COLUMNS, DEPTH = 128, 64
"""Columns of a program, and what it reads of each at once."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is cut.

    Attributes:
        warps: warps of a program.
        stages: pieces of matrix and rows on their way at once.
    """

    warps: int
    stages: int


DEFAULT_TUNING = Tuning(warps=8, stages=3)


def unsupported(
    x: jax.Array | jax.ShapeDtypeStruct, matrices: jax.Array | jax.ShapeDtypeStruct, size: int
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("x", x), ("matrices", matrices)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    _, columns, depth = matrices.shape
    if size not in SIZES:
        return f"blocks have {size} rows, wanted one of {', '.join(map(str, SIZES))}"
    for name, value, unit in (("O", columns, COLUMNS), ("I", depth, DEPTH)):
        if value % unit:
            return f"{name} is {value}, wanted a multiple of {unit}"
    return empty(x=x, matrices=matrices)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def block_linear(
    x: Float[Array, "R I"],
    row: Int[Array, "B S"],
    matrices: Float[Array, "X O I"],
    owner: Int[Array, "B"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "B S O"]:
    """The operation of `reference.block_linear` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """
    blocks, size = row.shape
    tuning = tuning or DEFAULT_TUNING
    number, columns, depth = matrices.shape

    def kernel(x_ref: Any, row_ref: Any, matrices_ref: Any, owner_ref: Any, out_ref: Any) -> None:
        first, block = pl.program_id(0) * COLUMNS, pl.program_id(1)
        one = owner_ref[block]

        @pl.when((one >= 0) & (one < number))
        def _() -> None:
            column = first + jnp.arange(COLUMNS)
            within = jnp.arange(size)
            rows = plt.load(row_ref.at[jnp.full(size, block), within])
            known = (rows >= 0) & (rows < x.shape[0])
            rows = jnp.where(known, rows, 0)

            def add(step: jax.Array, total: jax.Array) -> jax.Array:
                along = step * DEPTH + jnp.arange(DEPTH)
                matrix = plt.load(
                    matrices_ref.at[
                        jnp.full((COLUMNS, DEPTH), one),
                        jnp.broadcast_to(column[:, None], (COLUMNS, DEPTH)),
                        jnp.broadcast_to(along[None], (COLUMNS, DEPTH)),
                    ]
                )
                values = plt.load(
                    x_ref.at[
                        jnp.broadcast_to(rows[:, None], (size, DEPTH)),
                        jnp.broadcast_to(along[None], (size, DEPTH)),
                    ],
                    mask=jnp.broadcast_to(known[:, None], (size, DEPTH)),
                    other=0.0,
                )
                sides = (values, matrix) if size >= 64 else (matrix, values)
                return total + lax.dot_general(
                    *sides, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )

            shape = (size, COLUMNS) if size >= 64 else (COLUMNS, size)
            total = lax.fori_loop(0, depth // DEPTH, add, jnp.zeros(shape, jnp.float32))
            total = total if size >= 64 else total.T
            plt.store(
                out_ref.at[
                    jnp.full((size, COLUMNS), block),
                    jnp.broadcast_to(within[:, None], (size, COLUMNS)),
                    jnp.broadcast_to(column[None], (size, COLUMNS)),
                ],
                total.astype(out_ref.dtype),
            )

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((blocks, size, columns), x.dtype),
        grid=(columns // COLUMNS, blocks),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="block_linear",
    )(x, row, matrices, owner)
