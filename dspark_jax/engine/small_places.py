"""Free places in a GPU's memory for what is small, so that what is large always lies in the same.

XLA records the launches of a program as a CUDA graph, addresses included, and writes the graph anew
when the memory that a program works in has come to lie elsewhere. For a model of thirty layers that
takes the host longer than several of its steps: 4 to 11 ms a launch. JAX's allocator for GPUs
takes memory from the smallest free place that fits. So the small arrays of a dispatch, what goes in
and what comes out, lie in small places if there are any, and else at the front of the one large
place that is left, where the next program's memory would have begun.
"""

from __future__ import annotations

import jax
import numpy as np

SIZES = tuple(1 << power for power in range(8, 21))
"""Bytes of the places, up to what a step of a thousand requests reports."""

PLACES = 16
"""Free places of each size: of a few dispatches, and of the groups that begin in one."""


def keep_places(backend: str, where: jax.sharding.Sharding | None = None) -> list[jax.Array]:
    """Arrays between which such places are free for as long as somebody holds them.

    They take 34 MiB, and the places 32. Backends that record no addresses need none.

    Args:
        where: the device whose memory it is; None is the default one.
    """
    if backend != "gpu":
        return []
    held: list[jax.Array] = []
    for size in SIZES:
        row = [jax.device_put(np.zeros(size, np.int8), where) for _ in range(2 * PLACES + 1)]
        # a place is free when what lay there has been copied, and stays one between two that remain
        jax.block_until_ready(row)
        held += row[::2]
    return held
