"""Which positions of a recording its model decides, and which the recorder's order of sorting.

An indexer gives a row that none of its heads responds to a score of exactly 0. Where several such
rows compete for the last places, implementations differ, and so do all later positions that read
the result. These are left out of a comparison.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.cli.check_rows import Row, absolute
from dspark_jax.models.ragged import rectangle

TIE = 1e-6
"""Scores that are nearer to each other may swap by rounding."""


def decided(target: LoadedTarget, tokens: Int[np.ndarray, "S W"]) -> Bool[np.ndarray, "L+1 S W"]:
    """Where the embedding (entry 0) and the output of each layer follow from the equations."""
    layers = target.config.num_hidden_layers
    clear = np.ones((layers + 1, *tokens.shape), bool)
    if not hasattr(target.config.family, "choice_margins"):
        return clear
    margins = np.asarray(_margins(target.config, target.weights, tokens))
    for layer, margin in enumerate(margins.reshape(layers, *tokens.shape)):
        # a layer reads the rows of every earlier position
        clear[layer + 1] = np.logical_and.accumulate(clear[layer], axis=1) & (margin > TIE)
    return clear


def absolute_where(name: str, found: Any, wanted: Any, clear: Bool[np.ndarray, "S W"]) -> Row:
    """``absolute`` at the positions that are ``clear``; it says so where not all are."""
    if not clear.any():
        raise ValueError(f"{name} has no position that the model decides: record another text")
    row = absolute(name, found, wanted, clear[..., None])
    if clear.all():
        return row
    measure = f"{row.measure}, {clear.sum()} of {clear.size} positions"
    return dataclasses.replace(row, measure=measure)


@functools.partial(jax.jit, static_argnums=0)
def _margins(config: Any, weights: Any, tokens: Int[Array, "S W"]) -> Array:
    slots, width = tokens.shape
    cache = config.family.init_cache(config, slots, width, weights.embed.dtype)
    count = jnp.full(slots, width)
    packed = rectangle(jnp.asarray(tokens), jnp.zeros_like(count), count)
    return config.family.choice_margins(config, weights, cache, packed)
