"""Quantisation of latent rows in pure JAX: the definition of the bytes, and XLA's way there."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.kv_quant.layouts import Layout

LARGEST = 448.0
"""Of the finite e4m3 numbers."""

LEAST_SCALE = 1e-4
"""Before it is rounded up to a power of two; keeps a block of zeros from dividing by zero."""

_RUNS = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)
"""Runs of bytes of pages."""


def quantise(rows: Float[Array, "*B W"], layout: Layout) -> UInt8[Array, "*B C"]:
    """Bytes of finite rows: numbers and scales in the order of V3.2; in V4's, scales last.

    A block's scale is ``2 ** ceil(log2(max(amax / 448, 1e-4)))``, so that dividing by it loses
    nothing and no quotient overflows.

    Raises:
        ValueError: W is not the layout's.
    """
    if rows.shape[-1] != layout.width:
        raise ValueError(f"rows are {rows.shape[-1]} wide, wanted {layout.width}")
    blocks = rows[..., : layout.quantised].astype(jnp.float32)
    blocks = blocks.reshape(*rows.shape[:-1], -1, layout.block)
    # Without a division, which GPUs round in their own way, and 448 sits on an edge.
    most = jnp.maximum(jnp.abs(blocks).max(axis=-1), LARGEST * LEAST_SCALE)
    mantissa, exponent = jnp.frexp(most)
    full, shift = math.frexp(LARGEST)
    exponent = exponent - shift + (mantissa > full)
    numbers = (blocks * _power_of_two(-exponent)[..., None]).astype(jnp.float8_e4m3fn)
    numbers = _bytes(numbers.reshape(*rows.shape[:-1], layout.quantised))
    plain = _bytes(rows[..., layout.quantised :].astype(jnp.bfloat16))
    if not layout.exponents:
        return jnp.concatenate([numbers, _bytes(_power_of_two(exponent)), plain], axis=-1)
    scales = (exponent + 127).astype(jnp.uint8)
    padding = jnp.zeros((*rows.shape[:-1], layout.scale_bytes - scales.shape[-1]), jnp.uint8)
    return jnp.concatenate([numbers, plain, scales, padding], axis=-1)


def dequantise(
    row_bytes: UInt8[Array, "*B C"], layout: Layout, dtype: Any = jnp.bfloat16
) -> Float[Array, "*B W"]:
    """The rows that bytes of `quantise` stand for; exact in bf16, if scales are powers of two.

    Raises:
        ValueError: C is not the layout's.
    """
    if row_bytes.shape[-1] != layout.row_bytes:
        raise ValueError(f"rows have {row_bytes.shape[-1]} bytes, wanted {layout.row_bytes}")
    scale_at = layout.number_bytes if layout.exponents else layout.quantised
    plain_at = layout.quantised if layout.exponents else layout.quantised + layout.scale_bytes
    count = layout.quantised // layout.block
    numbers = _numbers(row_bytes[..., : layout.quantised], jnp.float8_e4m3fn)
    plain = _numbers(row_bytes[..., plain_at : plain_at + 2 * layout.plain], jnp.bfloat16)
    if layout.exponents:
        exponent = row_bytes[..., scale_at : scale_at + count].astype(jnp.int32) - 127
        scales = _power_of_two(exponent)
    else:
        scales = _numbers(row_bytes[..., scale_at : scale_at + 4 * count], jnp.float32)
    blocks = numbers.astype(jnp.float32).reshape(*scales.shape, layout.block)
    blocks = (blocks * scales[..., None]).reshape(*numbers.shape)
    return jnp.concatenate([blocks.astype(dtype), plain.astype(dtype)], axis=-1)


def empty_pages(pages: int, page_size: int, layout: Layout) -> UInt8[Array, "..."]:
    """A pool of zeros in the layout's shape."""
    if layout.exponents:
        return jnp.zeros((pages, layout.page_bytes(page_size)), jnp.uint8)
    return jnp.zeros((pages, page_size, layout.row_bytes), jnp.uint8)


def write(
    pool: UInt8[Array, "..."],
    slots: Int[Array, "T"],
    rows: Float[Array, "T W"],
    layout: Layout,
    page_size: int,
) -> UInt8[Array, "..."]:
    """``pool`` with each row quantised into slot ``page * page_size + offset``.

    Same arguments and result as `pallas_kernels.kv_quant.write`.
    """
    count = rows.shape[0]
    packed = quantise(rows, layout)
    inside = (slots >= 0) & (slots < pool.shape[0] * page_size)
    # Pages past the end, no two of them the same, so that all places are distinct.
    page = jnp.where(inside, slots // page_size, pool.shape[0] + jnp.arange(count))
    first, _, scales = layout.starts(slots % page_size, page_size)
    cuts = [layout.number_bytes] if layout.exponents else []
    flat = pool.reshape(pool.shape[0], -1)
    for start, part in zip((first, scales), jnp.split(packed, cuts, axis=1), strict=False):
        flat = lax.scatter(
            flat, jnp.stack([page, start], axis=1), part, _RUNS, unique_indices=True, mode="drop"
        )
    return flat.reshape(pool.shape)


def read(
    pool: UInt8[Array, "..."],
    slots: Int[Array, "*B"],
    layout: Layout,
    page_size: int,
    dtype: Any = jnp.bfloat16,
) -> Float[Array, "*B W"]:
    """Rows of slots that are all inside the pool."""
    page, places = _places(slots, layout, page_size)
    flat = pool.reshape(pool.shape[0], -1)
    packed = flat.at[page[..., None], places].get(mode="promise_in_bounds")
    return dequantise(packed, layout, dtype)


def _places(
    slots: Int[Array, "*B"], layout: Layout, page_size: int
) -> tuple[Int[Array, "*B"], Int[Array, "*B C"]]:
    """Page of each slot, and where its bytes are in the page."""
    page, offset = slots // page_size, slots % page_size
    first, _, scales = layout.starts(offset[..., None], page_size)
    byte = jnp.arange(layout.row_bytes, dtype=jnp.int32)
    if not layout.exponents:
        return page, first + byte
    of_scale = scales + byte - layout.number_bytes
    return page, jnp.where(byte < layout.number_bytes, first + byte, of_scale)


def _power_of_two(exponent: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Exactly, from -126 to 127; below that 0."""
    bits = jnp.clip(exponent + 127, 0, 254).astype(jnp.uint32) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bytes(numbers: jax.Array) -> UInt8[Array, "*B C"]:
    wide = lax.bitcast_convert_type(numbers, jnp.uint8)
    return wide if wide.ndim == numbers.ndim else wide.reshape(*numbers.shape[:-1], -1)


def _numbers(row_bytes: UInt8[Array, "*B C"], dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return lax.bitcast_convert_type(row_bytes, dtype)
    groups = row_bytes.reshape(*row_bytes.shape[:-1], -1, size)
    return lax.bitcast_convert_type(groups, dtype)
