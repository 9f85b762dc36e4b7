"""RMS norm, linear layers and SwiGLU's gate in pure JAX: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.row_linear.few_rows import MOST_ROWS, lanes_of, rows_product


def linear(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], out_dtype: DTypeLike | None = None
) -> Float[Array, "... O"]:
    """``x @ weight.T``, accumulated and returned in ``out_dtype`` (None: the dtype of ``x``).

    bf16 products of few rows are slow on CPUs: ``few_rows`` has its own, and where that does not
    pay a single row, which XLA would compute as scalars, is computed as two.
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
    out = jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    if doubled:
        out = out[:1]
    return out.reshape(*lead, weight.shape[0])


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
