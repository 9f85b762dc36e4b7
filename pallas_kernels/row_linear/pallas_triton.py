"""A few rows times a matrix in one launch, with norm, gate or residual: made for latency.

A product of one to sixteen rows only streams the matrix, and at a few MB it is over in the time
of a memory access or two; so a program owns a handful of outputs, asks for all its weights at
once, and computes whatever surrounds the product itself. Sixteen rows are always computed, so
that a row's result does not depend on the rows beside it.

One warpgroup's product is at least 64 rows high. The input's columns are therefore cut into
slices, which become rows of the left operand, and the weights' slices become columns of the
right one; of all pairs of slices only the equal ones are wanted, and their sum is the result.
That spreads the inner dimension over the warps, at the price of tensor-core work nobody waits
for. Pallas' Triton lowering is deprecated in JAX; the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.choice import empty
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.row_linear import reference

ROWS = 16
"""Rows of a launch; missing ones are computed as zeros."""

MAX_WIDTH = 2048
"""Input numbers a program can hold in registers."""

_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is cut.

    Attributes:
        outputs: outputs of a program; a power of two of at least 8.
        slices: slices of the inner dimension; a power of two.
        warps: warps of a program.
    """

    outputs: int = 8
    slices: int = 4
    warps: int = 4


DEFAULT = Tuning()


def unsupported(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct,
    gated: bool = False,
    tuning: Tuning = DEFAULT,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= ROWS:
        return f"x has {rows} rows, wanted 1 to {ROWS}"
    outputs, width = weight.shape
    if width % (16 * tuning.slices) or width > MAX_WIDTH:
        return (
            f"rows of x hold {width} numbers, wanted a multiple of {16 * tuning.slices} up to "
            f"{MAX_WIDTH}"
        )
    of_program = tuning.outputs * (2 if gated else 1)
    if outputs % of_program:
        return f"weight has {outputs} rows, wanted a multiple of {of_program}"
    return empty(weight=weight)


@functools.partial(jax.jit, static_argnames=("eps", "gated", "tuning", "interpret"))
def rms_linear(
    x: Float[Array, "... D"],
    norm: Float[Array, "D"],
    weight: Float[Array, "O D"],
    eps: float,
    gated: bool,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "... O"]:
    """The operation of `reference.rms_linear` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """

    def kernel(x: jax.Array, norm: jax.Array, weight: jax.Array) -> jax.Array:
        return _launch(x, weight, tuning, interpret, norm=norm, eps=eps, gated=gated)

    plain = functools.partial(reference.rms_linear, eps=eps, gated=gated)
    return differentiable(kernel, plain)(x, norm, weight)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def linear_add(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    residual: Float[Array, "... O"],
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "... O"]:
    """The operation of `reference.linear_add` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """

    def kernel(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
        return _launch(x, weight, tuning, interpret, residual=residual)

    return differentiable(kernel, reference.linear_add)(x, weight, residual)


def differentiable(kernel: Callable[..., Array], plain: Callable[..., Array]) -> Any:
    """``kernel`` forwards; backwards the gradient of ``plain``, which computes the same."""

    def backward(operands: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
        return jax.vjp(plain, *operands)[1](cotangent)

    operation = jax.custom_vjp(kernel)
    operation.defvjp(lambda *operands: (kernel(*operands), operands), backward)
    return operation


@lowered_once("tuning", "interpret", "eps", "gated")
def _launch(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    tuning: Tuning,
    interpret: bool,
    *,
    norm: Float[Array, "I"] | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Float[Array, "... O"] | None = None,
) -> Float[Array, "... O"]:
    lead, width = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, width)
    rows = flat.shape[0]
    outputs = weight.shape[0] // (2 if gated else 1)
    halves = 2 if gated else 1
    pieces = tuple(_pieces(width, tuning.slices))

    def fence() -> None:
        """The compiler moves loads down to their use, but not past this."""
        if not interpret:
            plt.debug_barrier()

    def kernel(*refs: Any) -> None:
        x_ref, weight_ref, *extra_ref, out_ref = refs
        first = pl.program_id(0) * tuning.outputs
        row = lax.broadcasted_iota(jnp.int32, (ROWS, tuning.outputs), 0)
        column = first + lax.broadcasted_iota(jnp.int32, (ROWS, tuning.outputs), 1)
        # Matrix and norm come from device memory, all else from the L2: they are asked for first,
        # and what waits for nothing but the L2 is done meanwhile.
        matrices = [
            [_weight_slices(weight_ref, half * outputs + first, piece, tuning) for piece in pieces]
            for half in range(halves)
        ]
        if norm is not None:
            factors = [_norm_slices(extra_ref[0], piece, tuning) for piece in pieces]
        fence()
        scale, added = None, None
        if norm is not None:
            chunks = _chunks(x_ref, rows, width)
            fence()
        if residual is not None:
            added = plt.load(extra_ref[0].at[row, column], mask=row < rows, other=0.0)
        inputs = [_input_slices(x_ref, rows, piece, tuning) for piece in pieces]
        if norm is not None:
            scale = lax.rsqrt(_mean_square(chunks) + eps)[:, None]
            matrices = [
                [_times(part, factor) for part, factor in zip(matrix, factors, strict=True)]
                for matrix in matrices
            ]
        elif not interpret:
            matrices = [[_late(part) for part in matrix] for matrix in matrices]
        products = [_product(inputs, matrix, tuning) for matrix in matrices]
        if scale is not None:
            products = [product * scale for product in products]
        out = _rounded(products[0])
        if gated:
            out = out / (1 + jnp.exp(-out)) * _rounded(products[1])
        if added is not None:
            out = added.astype(jnp.float32) + out
        plt.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=row < rows)

    extra = [operand for operand in (norm, residual) if operand is not None]
    extra = [operand.reshape(-1, outputs) if operand is residual else operand for operand in extra]
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        grid=(outputs // tuning.outputs,),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="row_linear",
    )(flat, weight, *extra)
    return out.reshape(*lead, outputs)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Columns ``start ..`` of the input: ``width`` of them in every slice, one after another."""

    start: int
    width: int


def _pieces(width: int, slices: int) -> Iterator[_Piece]:
    """Pieces whose slices are powers of two wide, as Triton wants them, widest first."""
    start = 0
    left = width // slices
    while left:
        piece = 1 << (left.bit_length() - 1)
        yield _Piece(start, piece)
        start += piece * slices
        left -= piece


def _input_slices(ref: Any, rows: int, piece: _Piece, tuning: Tuning) -> jax.Array:
    """``[ROWS * slices, piece.width]`` of the input, zero past ``rows``."""
    shape = (ROWS * tuning.slices, piece.width)
    index = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    # Shifts and masks: the division of signed numbers is a dozen instructions.
    row = index >> (tuning.slices.bit_length() - 1)
    column += piece.start + (index & (tuning.slices - 1)) * piece.width
    return plt.load(ref.at[row, column], mask=row < rows, other=0.0)


def _weight_slices(ref: Any, first: jax.Array, piece: _Piece, tuning: Tuning) -> jax.Array:
    """``[slices * outputs, piece.width]`` of the weights' rows from ``first`` on."""
    index, column = _weight_columns(piece, tuning)
    return plt.load(ref.at[first + (index & (tuning.outputs - 1)), column])


def _norm_slices(ref: Any, piece: _Piece, tuning: Tuning) -> jax.Array:
    """The norm's weights in the shape of `_weight_slices`, so that they lie as those do."""
    return plt.load(ref.at[_weight_columns(piece, tuning)[1]])


def _weight_columns(piece: _Piece, tuning: Tuning) -> tuple[jax.Array, jax.Array]:
    """Row of every element of `_weight_slices`, and the column of the weights it comes from."""
    shape = (tuning.slices * tuning.outputs, piece.width)
    index = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    slice_of = index >> (tuning.outputs.bit_length() - 1)
    return index, piece.start + slice_of * piece.width + column


def _chunks(ref: Any, rows: int, width: int) -> list[jax.Array]:
    """The whole input again, in tiles ``[ROWS, 64]``."""
    shape = (ROWS, _CHUNK)
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    return [
        plt.load(ref.at[row, start + column], mask=row < rows, other=0.0)
        for start in range(0, width, _CHUNK)
    ]


def _mean_square(chunks: list[jax.Array]) -> jax.Array:
    """``[ROWS]``. Equal tiles lie equally in registers: they are summed before any exchange."""
    squares = sum(chunk.astype(jnp.float32) * chunk.astype(jnp.float32) for chunk in chunks)
    assert isinstance(squares, jax.Array)
    return squares.sum(axis=1) / (len(chunks) * _CHUNK)


def _times(part: jax.Array, factor: jax.Array) -> jax.Array:
    return (part.astype(jnp.float32) * factor.astype(jnp.float32)).astype(jnp.bfloat16)


def _late(x: jax.Array) -> jax.Array:
    """``x`` itself, used no earlier than here.

    Triton stores a product's right operand in shared memory as soon as it is loaded. The wait
    for device memory would come before whatever is computed from the L2 meanwhile.
    """
    (out,) = plt.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


def _product(inputs: list[jax.Array], matrix: list[jax.Array], tuning: Tuning) -> jax.Array:
    """fp32 ``[ROWS, outputs]``: products of all pairs of slices, of which the equal ones count."""
    slices, outputs = tuning.slices, tuning.outputs
    pairs = sum(
        lax.dot_general(
            part,
            weights,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        for part, weights in zip(inputs, matrix, strict=True)
    )
    assert isinstance(pairs, jax.Array)
    pairs = pairs.reshape(ROWS, slices, slices, outputs)
    of_input = lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
    of_weight = lax.broadcasted_iota(jnp.int32, pairs.shape, 2)
    return jnp.where(of_input == of_weight, pairs, 0.0).sum(axis=2).sum(axis=1)


def _rounded(x: jax.Array) -> jax.Array:
    """fp32 numbers rounded to bf16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
