"""A residual plus a product of some hundred rows: the kernel of ``linear_add`` past 16 rows.

A program makes a tile of rows and outputs and walks the inner dimension, several pieces on their
way at once. A small model's products of so many rows are over in a few microseconds; cuBLAS cuts
them along the inner dimension and adds the parts up in a launch of its own. Pallas' Triton lowering
is deprecated in JAX; the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.row_linear import reference
from pallas_kernels.row_linear.pallas_triton import MAX_WIDTH, differentiable

MOST_ROWS = 256
"""Beyond, XLA's products are as good."""

ROWS, DEPTH = 64, 128
"""Rows of a program, as high as a tensor core's tile, and numbers of each read at once."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is cut.

    Attributes:
        outputs: outputs of a program; a power of two of at least 16.
        stages: pieces on their way at once.
        warps: warps of a program.
    """

    outputs: int
    stages: int
    warps: int = 4


def tuning_for(rows: int) -> Tuning:
    """The cut that was fastest on an H200 (docs/kernels/row_linear.md)."""
    return Tuning(outputs=16, stages=4) if rows <= 128 else Tuning(outputs=32, stages=3)


def unsupported(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct,
    tuning: Tuning | None = None,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= MOST_ROWS:
        return f"x has {rows} rows, wanted 1 to {MOST_ROWS}"
    outputs, width = weight.shape
    if width % (DEPTH // 2) or not 0 < width <= MAX_WIDTH:
        return f"rows of x hold {width} numbers, wanted a multiple of {DEPTH // 2} to {MAX_WIDTH}"
    of_program = (tuning or tuning_for(rows)).outputs
    if not outputs or outputs % of_program:
        return f"weight has {outputs} rows, wanted a multiple of {of_program}"
    return None


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def linear_add(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    residual: Float[Array, "... O"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "... O"]:
    """The operation of `reference.linear_add` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """
    tuning = tuning or tuning_for(math.prod(x.shape[:-1]))

    def kernel(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
        return _launch(x, weight, residual, tuning, interpret)

    return differentiable(kernel, reference.linear_add)(x, weight, residual)


@lowered_once("tuning", "interpret")
def _launch(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    residual: Float[Array, "... O"],
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "... O"]:
    outputs, width = weight.shape
    flat = x.reshape(-1, width)
    rows = flat.shape[0]

    def kernel(x_ref: Any, weight_ref: Any, residual_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(1) * ROWS + jnp.arange(ROWS)
        column = pl.program_id(0) * tuning.outputs + jnp.arange(tuning.outputs)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            along = step * DEPTH + jnp.arange(DEPTH)
            within = along < width if width % DEPTH else None
            values = _tile(x_ref, row, along, row < rows, within)
            matrix = _tile(weight_ref, column, along, None, within)
            return total + lax.dot_general(
                values, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )

        nothing = jnp.zeros((ROWS, tuning.outputs), jnp.float32)
        total = lax.fori_loop(0, -(-width // DEPTH), add, nothing).astype(out_ref.dtype)
        added = _tile(residual_ref, row, column, row < rows, None)
        out = added.astype(jnp.float32) + total.astype(jnp.float32)
        index, mask = _index(row, column), _mask(row, column, row < rows, None)
        plt.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        grid=(outputs // tuning.outputs, -(-rows // ROWS)),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="linear_add",
    )(flat, weight, residual.reshape(-1, outputs))
    return out.reshape(residual.shape)


def _tile(
    ref: Any, row: jax.Array, column: jax.Array, rows: jax.Array | None, columns: jax.Array | None
) -> jax.Array:
    """Elements of these rows and columns; zeros where the masks ``rows`` or ``columns`` say no."""
    mask = _mask(row, column, rows, columns)
    return plt.load(ref.at[_index(row, column)], mask=mask, other=None if mask is None else 0.0)


def _index(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (row.size, column.size)
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)


def _mask(
    row: jax.Array, column: jax.Array, rows: jax.Array | None, columns: jax.Array | None
) -> jax.Array | None:
    shape = (row.size, column.size)
    masks = [] if rows is None else [jnp.broadcast_to(rows[:, None], shape)]
    masks += [] if columns is None else [jnp.broadcast_to(columns[None], shape)]
    return functools.reduce(jnp.logical_and, masks) if masks else None
