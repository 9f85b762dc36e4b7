"""Experts over whole sequences: few of them all run, many are visited as in serving."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.experts import Experts, routed_experts
from train.losses import Ratio

SPARE = 4
"""Products that running all experts may cost, over those of the experts chosen."""
BALANCE_SPEED = 1e-3
"""What a step adds to the bias of an expert with too little load (DeepSeek-V3 report, 4.2)."""


def sequence_experts(
    x: Float[Array, "T D"],
    ids: Int[Array, "T c"],
    weights: Float[Array, "T c"],
    experts: Experts,
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """As ``routed_experts``, which runs a block of tokens after another.

    Where experts are few, all of them run on all tokens in three products, and what was not
    chosen weighs 0: thousands of tokens an expert would be dozens of small blocks.
    """
    number = experts.gate_up.shape[0]
    if number > SPARE * ids.shape[1]:
        return routed_experts(x, ids, weights, experts, limit=limit, implementation="xla")
    share = (weights[..., None] * (ids[..., None] == jnp.arange(number))).sum(axis=1)
    both = jnp.einsum("td,xfd->xtf", x, experts.gate_up)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    inner = (jax.nn.silu(gate) * up * share.T[..., None]).astype(x.dtype)
    out = jnp.einsum("xtf,xdf->td", inner, experts.down, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def expert_load(ids: Int[Array, "T c"], real: Bool[Array, "T"], number: int) -> Float[Array, "X"]:
    """Share of the ``real`` tokens' places that went to each of ``number`` experts."""
    taken = (ids[..., None] == jnp.arange(number)).sum(axis=1) * real[:, None]
    return taken.sum(axis=0) / jnp.maximum(taken.sum(), 1)


def load_figures(loads: Sequence[Float[Array, "X"]]) -> dict[str, Ratio]:
    """``expert_load``: the fullest expert over an even share, as a mean of layers, if any."""
    if not loads:
        return {}
    fullest = jnp.stack([load.max() * load.size for load in loads]).sum()
    return {"expert_load": Ratio(fullest, jnp.float32(len(loads)))}


def balanced_bias(bias: Float[Array, "X"], load: Float[Array, "X"]) -> Float[Array, "X"]:
    """A router's bias moved against the load: no loss, a step of fixed size (V3 report, 2.1.2)."""
    return bias + BALANCE_SPEED * jnp.sign(1 / load.size - load)
