"""JAX's default random bits and Gumbel noise, element by element, for use inside a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ONE = 0x3F800000


def bits(first: jax.Array, second: jax.Array, counter: jax.Array) -> jax.Array:
    """uint32 that ``jax.random.bits`` of the key (first, second) has at index ``counter``.

    Threefry-2x32 with 20 rounds (Salmon et al., SC 2011) of the 64-bit index, its two words joined
    by exclusive or: the scheme of ``jax_threefry_partitionable``. All uint32, of shapes that
    broadcast; an array has fewer than 2**32 elements.
    """
    key = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    low = jnp.broadcast_to(first, jnp.broadcast_shapes(first.shape, counter.shape))
    high = counter + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            low = low + high
            turned = (high << jnp.uint32(rotation)) | (high >> jnp.uint32(32 - rotation))
            high = low ^ turned
        low = low + key[(group + 1) % 3]
        high = high + key[(group + 2) % 3] + jnp.uint32(group + 1)
    return low ^ high


def gumbel(first: jax.Array, second: jax.Array, counter: jax.Array) -> jax.Array:
    """fp32 that ``jax.random.gumbel`` of the key has at index ``counter``, but for its logs."""
    mantissa = (bits(first, second, counter) >> jnp.uint32(9)) | jnp.uint32(_ONE)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    uniform = jnp.maximum(uniform, float(jnp.finfo(jnp.float32).tiny))
    return -jnp.log(-jnp.log(uniform))
