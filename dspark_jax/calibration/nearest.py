"""Which STS temperatures each request of a step uses."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def nearest_temperatures(
    temperatures: Float[Array, "M G"],
    keys: Float[Array, "M"],
    sampling_temperature: Float[Array, "S"],
) -> Float[Array, "S G"]:
    """The row fitted at the sampling temperature nearest to each request's; the lower on a tie.

    ``keys`` holds the sampling temperatures of the rows in increasing order, 0 = greedy.
    """
    distance = jnp.abs(sampling_temperature[:, None] - keys[None])
    return temperatures[jnp.argmin(distance, axis=1)]
