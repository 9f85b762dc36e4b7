"""Indexer scores in pure JAX: what the kernel must compute."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.indexer_logits.operands import Batch


def indexer_logits(
    query: Float[Array, "T J I"],
    weight: Float[Array, "T J"],
    keys: Float[Array, "M P I"],
    batch: Batch,
) -> Float[Array, "T K"]:
    """Same arguments and result as `pallas_kernels.indexer_logits.indexer_logits`."""
    page = jnp.where(batch.pages >= 0, batch.pages, keys.shape[0])
    own = jnp.take(keys, page, axis=0, mode="fill", fill_value=0)
    own = own.reshape(page.shape[0], page.shape[1] * keys.shape[1], keys.shape[2])
    of_row = functools.partial(jnp.take, indices=batch.row, axis=0, mode="fill", fill_value=0)
    scores = index_scores(of_row(query), of_row(weight), own)
    out = jnp.zeros((query.shape[0], own.shape[1]), jnp.float32)
    return out.at[batch.row].set(scores, mode="drop")


def index_scores(
    query: Float[Array, "A W J I"], weight: Float[Array, "A W J"], keys: Float[Array, "A K I"]
) -> Float[Array, "A W K"]:
    """fp32 scores of all keys, head by head: all heads at once would be J times the result."""

    def add(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
        query, weight = head
        product = jnp.einsum("awi,aki->awk", query, keys, preferred_element_type=jnp.float32)
        return total + weight[..., None] * jax.nn.relu(product), None

    start = jnp.zeros((*query.shape[:2], keys.shape[1]), jnp.float32)
    return jax.lax.scan(add, start, (jnp.moveaxis(query, 2, 0), jnp.moveaxis(weight, 2, 0)))[0]
