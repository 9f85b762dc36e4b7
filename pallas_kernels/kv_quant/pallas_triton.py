"""Quantisation and the write to the pages in one launch: a program handles a few rows.

The pool is aliased in place and only bytes of the named rows are touched. Scales and codes are
worked out on the bits of the numbers: every step is exact, so that the bytes are the reference's
whatever the compiler makes of a division or a cast. Pallas' Triton lowering is deprecated in JAX;
the body could move to jax_triton as it is.
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
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.choice import empty
from pallas_kernels.kv_quant.layouts import V3_2, V4, Layout
from pallas_kernels.kv_quant.reference import LEAST_SCALE

_LEAST_EXPONENT = math.ceil(math.log2(LEAST_SCALE))
_MANTISSA = 0x7FFFFF
_LARGEST_EXPONENT, _LARGEST_MANTISSA = 8, 0x600000
"""Of `LARGEST`, which is 1.75 * 2^8."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How rows are dealt to programs.

    Attributes:
        rows: rows of a program; a power of two.
        warps: warps of a program.
    """

    rows: int
    warps: int


FEW = Tuning(rows=1, warps=1)
MANY = Tuning(rows=4, warps=4)
_FEW_ROWS = 256


def tuning_for(rows: int) -> Tuning:
    """One row a program until that many programs no longer start at once."""
    return FEW if rows <= _FEW_ROWS else MANY


def unsupported(
    pool: jax.Array | jax.ShapeDtypeStruct,
    slots: jax.Array | jax.ShapeDtypeStruct,
    rows: jax.Array | jax.ShapeDtypeStruct,
    layout: Layout,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    named = {"pool": (pool, jnp.uint8), "slots": (slots, jnp.int32), "rows": (rows, jnp.bfloat16)}
    for name, (operand, dtype) in named.items():
        if operand.dtype != dtype:
            return f"the dtype of {name} is {operand.dtype}, wanted {jnp.dtype(dtype)}"
    if layout not in (V3_2, V4):
        return f"layout is {layout}, wanted V3_2 or V4"
    # Pallas counts places in 32 bits up to 4 GiB, and Triton takes them as signed: with numbers of
    # one byte, places of the upper half would be negative.
    if 1 << 31 < pool.size <= 1 << 32:
        return f"pool has {pool.size} bytes, wanted at most 2^31 or more than 2^32"
    return empty(pool=pool, rows=rows)


@functools.partial(jax.jit, static_argnames=("layout", "page_size", "tuning", "interpret"))
def write(
    pool: UInt8[Array, "..."],
    slots: Int[Array, "T"],
    rows: Float[Array, "T W"],
    layout: Layout,
    page_size: int,
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> UInt8[Array, "..."]:
    """The operation of `reference.write` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """
    pages, count = pool.shape[0], rows.shape[0]
    tuning = tuning or tuning_for(count)
    blocks = layout.quantised // layout.block
    # Rows are cut into lines of a block each. V4's eighth line has no numbers, and the padding
    # of the scales for its scale.
    lines = pl.next_power_of_2(blocks)

    def kernel(slots_ref: Any, rows_ref: Any, _: Any, pool_ref: Any) -> None:
        first = pl.program_id(0) * tuning.rows

        def locate(row: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
            slot = plt.load(slots_ref.at[row], mask=row < count, other=-1)
            inside = (slot >= 0) & (slot < pages * page_size)
            slot = jnp.where(inside, slot, 0)
            # A page past the end, so that the interpreter drops what the mask hides.
            page = jnp.where(inside, lax.div(slot, page_size), pages)
            return inside, page, layout.starts(lax.rem(slot, page_size), page_size)

        def read(row: jax.Array, column: jax.Array, mask: jax.Array) -> jax.Array:
            return plt.load(rows_ref.at[_across(row, column), column], mask=mask, other=0.0)

        def store(page: jax.Array, at: jax.Array, byte: jax.Array, mask: jax.Array) -> None:
            page = jnp.where(mask, _across(page, at), pages)
            plt.store(pool_ref.at[page, at], byte.astype(jnp.uint8), mask=mask)

        line = jnp.arange(tuning.rows * lines)
        row, block = first + (line >> lines.bit_length() - 1), line & (lines - 1)
        inside, page, (numbers_at, _, scales_at) = locate(row)
        column = block[:, None] * layout.block + jnp.arange(layout.block)[None]
        mask = _across(inside & (block < blocks), column)
        bits = _int32(read(row, column, mask).astype(jnp.float32))
        magnitude = bits & 0x7FFFFFFF
        exponent = _scale_exponent(magnitude.max(axis=1))
        code = _e4m3(_float32(magnitude) * _power_of_two(-exponent)[:, None])
        code = code | (bits >> 24) & 0x80
        store(page, numbers_at[:, None] + column, code, mask)

        exponent = jnp.where(block < blocks, exponent + 127, 0)
        scale = exponent if layout.exponents else exponent << 23
        scale_bytes = layout.scale_bytes // lines
        for byte in range(scale_bytes):
            at = scales_at + block * scale_bytes + byte
            store(page, at, scale >> 8 * byte & 0xFF, inside)

        row = first + jnp.arange(tuning.rows)
        inside, page, (_, plain_at, _) = locate(row)
        byte = jnp.broadcast_to(jnp.arange(2 * layout.plain)[None], (tuning.rows, 2 * layout.plain))
        mask = _across(inside, byte)
        plain = read(row, layout.quantised + (byte >> 1), mask)
        plain = lax.bitcast_convert_type(plain, jnp.uint16).astype(jnp.int32)
        store(page, plain_at[:, None] + byte, plain >> 8 * (byte & 1) & 0xFF, mask)

    flat = pool.reshape(pages, -1)
    written = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(pl.cdiv(count, tuning.rows),),
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="kv_quant_write",
    )(slots, rows, flat)
    return written.reshape(pool.shape)


def _across(x: jax.Array, like: jax.Array) -> jax.Array:
    """A number a line for every column."""
    return jnp.broadcast_to(x[:, None], like.shape) if like.ndim == 2 else x


def _int32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float32(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return _float32((exponent + 127) << 23)


def _scale_exponent(amax: jax.Array) -> jax.Array:
    """The least exponent that brings the fp32 number of these bits to at most `LARGEST`."""
    above = (amax & _MANTISSA) > _LARGEST_MANTISSA
    exponent = (amax >> 23) - 127 - _LARGEST_EXPONENT + above.astype(jnp.int32)
    return jnp.maximum(exponent, _LEAST_EXPONENT)


def _e4m3(x: jax.Array) -> jax.Array:
    """Codes of fp32 numbers of 0 to `LARGEST`, rounded to nearest even.

    Numbers of an exponent, or below the least one, are multiples of an eighth of its power of two;
    added to 2^23, so many eighths leave none of fp32's bits for what is to be rounded. Codes
    count on from one exponent to the next, and so does the sum.
    """
    exponent = jnp.maximum((_int32(x) >> 23) - 127, -6)
    eighths = x * _power_of_two(3 - exponent) + 2.0**23
    return ((exponent + 6) << 3) + (_int32(eighths) & _MANTISSA)
