"""Whose keys each query token is scored against."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Batch(NamedTuple):
    """Query tokens of A requests, up to W of each, packed into T rows.

    Attributes:
        row: packed row of the w-th token of request a; T or more where there is none. The tokens
            of a request come first.
        pages: pages of the keys of each request, in order; one below 0 or past the pool holds
            keys of zeros.
        seen: keys that each packed row sees, from the first on.
    """

    row: Int[Array, "A W"]
    pages: Int[Array, "A C"]
    seen: Int[Array, "T"]

    def count(self) -> Int[Array, "A"]:
        """Tokens of each request."""
        return (self.row < self.seen.shape[0]).sum(axis=1, dtype=jnp.int32)


def check(
    query: Float[Array, "T J I"],
    weight: Float[Array, "T J"],
    keys: Float[Array, "M P I"],
    batch: Batch,
) -> None:
    """Raises ValueError where shapes disagree, naming the operand, its shape and the wanted one."""
    tokens, heads, width = query.shape
    requests = batch.row.shape[0]
    wanted = {
        "weight": (weight, (tokens, heads)),
        "keys": (keys, (*keys.shape[:2], width)),
        "pages": (batch.pages, (requests, batch.pages.shape[-1])),
        "seen": (batch.seen, (tokens,)),
    }
    for name, (operand, shape) in wanted.items():
        if operand.shape != shape:
            raise ValueError(f"{name} has shape {operand.shape}, wanted {shape}")
