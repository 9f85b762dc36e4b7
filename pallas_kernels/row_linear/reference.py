"""RMS norm, linear layers and SwiGLU's gate in pure JAX: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.row_linear.few_rows import MOST_ROWS, lanes_of, rows_product

TILE = 16
"""Columns of XLA's CPU product that cost what one of them costs."""

MOST_COLUMNS = 64
"""Above, the left operand is worth packing."""

MOST_SPARE = 5
"""Columns of the last tile that may be empty."""


def linear(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], out_dtype: DTypeLike | None = None
) -> Float[Array, "... O"]:
    """``x @ weight.T``, accumulated and returned in ``out_dtype`` (None: the dtype of ``x``).

    bf16 products of few rows are slow on CPUs: ``few_rows`` has its own for the fewest, and XLA is
    asked for some as ``weight @ x.T``. A single row that neither takes, which XLA would compute as
    scalars, is computed as two.
    """
    lead = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    dtype = x.dtype if out_dtype is None else out_dtype
    slow = x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    lanes = lanes_of(rows.shape[1]) if slow and 0 < rows.shape[0] <= MOST_ROWS else None
    if lanes is not None:
        out = rows_product(rows, weight, lanes).astype(dtype)
        return out.reshape(*lead, weight.shape[0])
    doubled = slow and rows.shape[0] == 1
    if doubled:
        rows = jnp.concatenate([rows, rows])
    if slow and rows.shape[0] <= MOST_COLUMNS and -rows.shape[0] % TILE <= MOST_SPARE:
        out = _by_columns(rows, weight).astype(dtype)
    else:
        product = (((1,), (1,)), ((), ()))
        out = jax.lax.dot_general(rows, weight, product, preferred_element_type=dtype)
    if doubled:
        out = out[:1]
    return out.reshape(*lead, weight.shape[0])


def _by_columns(rows: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """``rows @ weight.T`` in fp32 as the transpose of ``weight @ rows.T``.

    XLA's CPU product packs its right operand anew at every call: better a few rows than all
    weights, if they fill its tiles.
    """
    count = rows.shape[0]
    rows = jnp.pad(rows, ((0, -count % TILE), (0, 0)))
    product = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(weight, rows, product, preferred_element_type=jnp.float32)
    # else XLA would turn it around again
    return jax.lax.optimization_barrier(out)[:, :count].T


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """RMS norm in fp32, result in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)


def rms_linear(
    x: Float[Array, "... D"],
    norm: Float[Array, "D"],
    weight: Float[Array, "O D"],
    eps: float,
    gated: bool,
) -> Float[Array, "... O"]:
    """Same arguments and result as `pallas_kernels.row_linear.rms_linear`."""
    out = linear(rms_norm(x, norm, eps), weight)
    if not gated:
        return out
    gate, up = jnp.split(out, 2, axis=-1)
    return jax.nn.silu(gate) * up


def linear_add(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], residual: Float[Array, "... O"]
) -> Float[Array, "... O"]:
    """Same arguments and result as `pallas_kernels.row_linear.linear_add`."""
    return residual + linear(x, weight)
