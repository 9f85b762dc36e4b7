"""Attention of many draft blocks over one sequence, each over what its anchor may see.

Anchors stand in order, so neighbours see nearly the same context. A group of blocks is one
attention problem: its own rows first, then the context up to the group's last anchor; keys
behind that are never read, and a mask does the rest.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from train.fused_attention import attention

GROUP = 64
"""Blocks a group: fewer leave the matrix units idle, more see keys that most may not."""


def attend_in_groups(
    query: Float[Array, "B A G H E"],
    context_keys: Float[Array, "B N K E"],
    context_values: Float[Array, "B N K E"],
    block_keys: Float[Array, "B A G N E"],
    block_values: Float[Array, "B A G N E"],
    visible: Bool[Array, "B A K"],
) -> Float[Array, "B A G H*E"]:
    """One softmax over a block's own keys and the context rows ``visible`` to its anchor."""
    batch, anchors, width, heads, head_dim = query.shape
    size = next(size for size in range(min(GROUP, anchors), 0, -1) if anchors % size == 0)
    groups, rows, length = anchors // size, size * width, context_keys.shape[2]

    def own(values: Array) -> Array:
        return values.reshape(batch * groups, rows, *values.shape[3:])

    def shared(context: Array) -> Array:
        by_row = jnp.swapaxes(context, 1, 2)[:, None]
        spread = jnp.broadcast_to(by_row, (batch, groups, *by_row.shape[2:]))
        return spread.reshape(batch * groups, *by_row.shape[2:])

    block = jnp.arange(rows) // width
    same_block = jnp.broadcast_to(block[:, None] == block, (batch * groups, rows, rows))
    seen = visible.reshape(batch * groups, size, length)
    reach = jnp.max(jnp.where(seen, jnp.arange(1, length + 1), 0), axis=(1, 2))
    mask = jnp.concatenate([same_block, jnp.repeat(seen, width, axis=1)], axis=2)

    # cuDNN wants even lengths with a mask; what is added is masked out and cut off again.
    more_rows, more_keys = rows % 2, (rows + length) % 2
    padded_keys = ((0, 0), (0, more_keys), (0, 0), (0, 0))
    mixed = attention(
        jnp.pad(own(query), ((0, 0), (0, more_rows), (0, 0), (0, 0))),
        jnp.pad(jnp.concatenate([own(block_keys), shared(context_keys)], axis=1), padded_keys),
        jnp.pad(jnp.concatenate([own(block_values), shared(context_values)], axis=1), padded_keys),
        mask=jnp.pad(mask, ((0, 0), (0, more_rows), (0, more_keys)))[:, None],
        key_value_seq_lengths=(rows + reach).astype(jnp.int32),
    )
    return mixed[:, :rows].reshape(batch, anchors, width, heads * head_dim)
