"""Sparse MLA in pure JAX: what every kernel must compute, and the XLA implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.sparse_mla.selection import Selection

TOKENS = 64
"""Tokens whose keys are gathered at once: 150 MB of them at 2048 keys of 576 bf16 numbers."""


def sparse_mla(
    query: Float[Array, "T H W"],
    selections: Sequence[Selection],
    sinks: Float[Array, "H"] | None,
    sm_scale: float,
    value_width: int,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of each token over the rows that all its ``selections`` list.

    Result of `pallas_kernels.sparse_mla.sparse_mla`. Scores, softmax and sums are fp32; the
    unnormalised weights are rounded to the dtype of ``query`` for the product with the values,
    and the sum is divided in fp32.
    """
    if sinks is None:
        sinks = jnp.full(query.shape[1], -jnp.inf, jnp.float32)

    def attend(operands):
        query, *rows = operands
        keys = [s.keys(r, query.dtype) for s, r in zip(selections, rows, strict=True)]
        named = jnp.concatenate(rows) >= 0
        return _attend(query, jnp.concatenate(keys), named, sinks, sm_scale, value_width)

    operands = (query, *(s.rows() for s in selections))
    if query.shape[0] <= TOKENS:
        return jax.vmap(attend)(operands)
    return lax.map(attend, operands, batch_size=TOKENS)


def _attend(
    query: Float[Array, "H W"],
    keys: Float[Array, "K W"],
    named: Bool[Array, "K"],
    sinks: Float[Array, "H"],
    sm_scale: float,
    value_width: int,
) -> tuple[Float[Array, "H V"], Float[Array, "H"]]:
    """One token; the first ``value_width`` numbers of a key are its value."""
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.einsum("hw,kw->hk", query, keys, preferred_element_type=jnp.float32) * sm_scale
    top = jnp.where(named, scores, lowest).max(axis=-1, initial=lowest)
    weights = jnp.where(named, jnp.exp(scores - top[:, None]), 0)
    total = weights.sum(axis=-1)
    out = jnp.einsum(
        "hk,kv->hv",
        weights.astype(query.dtype),
        keys[:, :value_width],
        preferred_element_type=jnp.float32,
    )
    some = named.any()
    out = jnp.where(some, out / (total + jnp.exp(sinks - top))[:, None], 0)
    lse = jnp.where(some, top + jnp.log(total), jnp.inf)
    return out.astype(query.dtype), lse
