"""Products of blocks in pure JAX, one block after another: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_linear(
    x: Float[Array, "R I"],
    row: Int[Array, "B S"],
    matrices: Float[Array, "X O I"],
    owner: Int[Array, "B"],
) -> Float[Array, "B S O"]:
    """Same arguments and result as `pallas_kernels.block_linear.block_linear`."""

    def block(operands: tuple[Array, Array]) -> Array:
        row, owner = operands
        known = (row >= 0) & (row < x.shape[0])
        rows = jnp.where(known[:, None], x[jnp.where(known, row, 0)], 0)
        matrix = matrices[jnp.clip(owner, 0, matrices.shape[0] - 1)]
        return jnp.einsum("si,oi->so", rows, matrix, preferred_element_type=jnp.float32)

    return jax.lax.map(block, (row, owner)).astype(x.dtype)
