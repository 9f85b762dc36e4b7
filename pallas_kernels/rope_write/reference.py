"""RoPE and cache writes in pure JAX: what the kernel must compute, and the XLA implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.row_linear.reference import rms_norm


def rotate(
    x: Float[Array, "... X E"], cos: Float[Array, "... E/2"], sin: Float[Array, "... E/2"]
) -> Float[Array, "... X E"]:
    """Apply RoPE to heads ``x``, halves split as Hugging Face does; phases lack the head axis."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_write(
    fused: Float[Array, "T (H+2N)E"],
    cos: Float[Array, "T E/2"],
    sin: Float[Array, "T E/2"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
    q_norm: Float[Array, "E"] | None,
    k_norm: Float[Array, "E"] | None,
    eps: float,
    finite: bool,
) -> tuple[Float[Array, "T H E"], Float[Array, "S N K E"], Float[Array, "S N K E"]]:
    """Same arguments and result as `pallas_kernels.rope_write.rope_write`."""
    groups, head_dim = keys.shape[1], keys.shape[3]
    heads = fused.shape[1] // head_dim - 2 * groups
    split = fused.reshape(fused.shape[0], heads + 2 * groups, head_dim)
    query, key, value = jnp.split(split, [heads, heads + groups], axis=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    key = rotate(key, cos, sin)
    return (
        rotate(query, cos, sin),
        _write(keys, key, slot, position, finite),
        _write(values, value, slot, position, finite),
    )


def _write(
    cache: Float[Array, "S N K E"],
    rows: Float[Array, "T N E"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
    finite: bool,
) -> Float[Array, "S N K E"]:
    rows = rows.astype(cache.dtype)
    if finite:
        rows = jnp.nan_to_num(rows)
    written = cache.at[slot, :, position].set(rows, mode="drop", wrap_negative_indices=False)
    # XLA would repeat the write of a single row inside each of its readers, and copy the cache
    # so that it can
    return jax.lax.optimization_barrier(written)
