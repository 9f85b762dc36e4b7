"""Sequential heads: the prefix-dependent logit bias of vanilla, gated and RNN Markov heads.

A head works in rank space (``[..., R]``); ``w2`` turns the result into a vocabulary bias.
With ``markov_rank`` 0 there is no head, no bias and no embedding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafter.confidence import confidence_logit
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import DrafterWeights, MarkovHead
from dspark_jax.models.layers import linear
from pallas_kernels.best_linear import avoids_logits, best_linear

LOGIT_BYTES = 40
"""What passes through memory for a draft's logit, base and bias and argmax, at 4.3 TB/s: a block of
7 of 49152 columns took 3.4 us a request on an H200."""


def vocabulary_logits(
    x: Float[Array, "... I"], weight: Float[Array, "V I"]
) -> Float[Array, "... V"]:
    """``x @ weight.T`` accumulated and returned in fp32."""
    return linear(x, weight, jnp.float32)


def markov_embedding(head: MarkovHead, previous: Int[Array, "..."]) -> Float[Array, "... R"]:
    """Rank-space embedding of the previous target token (the anchor at position 0)."""
    return jnp.take(head.w1, previous, axis=0)


def rank_step(
    config: DrafterConfig,
    head: MarkovHead,
    state: Float[Array, "... R"] | None,
    hidden: Float[Array, "... D"],
    embedding: Float[Array, "... R"],
) -> tuple[Float[Array, "... R"], Float[Array, "... R"] | None]:
    """One position: the vector ``w2`` is applied to, and the next state (RNN only).

    vanilla: e. gated: sigmoid(gate [h; e]) * e. rnn: (g, c, o) = split(joint [s; e; h]),
    output tanh(o), next state sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c).
    """
    hidden = hidden.astype(embedding.dtype)
    if config.markov_head_type == "vanilla":
        return embedding, state
    if config.markov_head_type == "gated":
        assert head.gate is not None
        assert head.gate_bias is not None
        mixed = jnp.concatenate([hidden, embedding], axis=-1)
        return jax.nn.sigmoid(linear(mixed, head.gate) + head.gate_bias) * embedding, state
    assert state is not None
    assert head.joint is not None
    assert head.joint_bias is not None
    mixed = jnp.concatenate([state, embedding, hidden], axis=-1)
    gate, candidate, out = jnp.split(linear(mixed, head.joint) + head.joint_bias, 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    return jnp.tanh(out), keep * state + (1 - keep) * jnp.tanh(candidate)


def start_state(
    config: DrafterConfig, weights: DrafterWeights, lead: tuple[int, ...]
) -> Float[Array, "... R"] | None:
    """State before the first position of a block: zeros for the RNN head, None elsewhere."""
    if weights.markov is None or config.markov_head_type != "rnn":
        return None
    return jnp.zeros((*lead, config.markov_rank), weights.markov.w1.dtype)


def walk_position(
    config: DrafterConfig,
    weights: DrafterWeights,
    state: Float[Array, "... R"] | None,
    hidden: Float[Array, "... D"],
    previous: Int[Array, "..."],
) -> tuple[Float[Array, "... Vd"] | None, Array | None]:
    """One position of the walk: fp32 logit bias, None without a sequential head; next state."""
    ranked, state = _ranked(config, weights, state, hidden, previous)
    if ranked is None:
        return None, state
    assert weights.markov is not None
    return vocabulary_logits(ranked, weights.markov.w2), state


def confidences(
    config: DrafterConfig,
    weights: DrafterWeights,
    hidden: Float[Array, "... D"],
    previous: Int[Array, "..."],
) -> Float[Array, "..."] | None:
    """fp32 confidence logits of any positions; None without a confidence head."""
    embedding = None
    if config.confidence_head_with_markov and weights.markov is not None:
        embedding = markov_embedding(weights.markov, previous)
    return _confidence(config, weights, hidden, embedding)


def walks_without_logits(
    head: Float[Array, "Vd D"], w2: Float[Array, "Vd R"] | None, slots: int
) -> bool:
    """Whether the best of ``head``'s logits plus bias is found without writing either.

    That reads the head once a position and not once a block: it pays where a column of the head
    has no more bytes than the requests' logits cost.
    """

    def rows(matrix: Float[Array, "Vd I"]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((slots, matrix.shape[1]), matrix.dtype)

    pays = slots * LOGIT_BYTES >= head.shape[1] * head.dtype.itemsize
    return pays and avoids_logits(rows(head), head, None if w2 is None else (rows(w2), w2))


def best_position(
    config: DrafterConfig,
    weights: DrafterWeights,
    head: Float[Array, "Vd D"],
    state: Float[Array, "S R"] | None,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Int[Array, "S"], Array | None]:
    """`walk_position` of greedy requests: the best column of ``head``'s logits plus bias.

    A bias is a product of low rank, whatever the head, so neither has to be written.
    """
    ranked, state = _ranked(config, weights, state, hidden, previous)
    low_rank = None
    if ranked is not None:
        assert weights.markov is not None
        low_rank = ranked, weights.markov.w2
    column, _ = best_linear(hidden.astype(head.dtype), head, low_rank)
    return column, state


def _ranked(
    config: DrafterConfig,
    weights: DrafterWeights,
    state: Float[Array, "... R"] | None,
    hidden: Float[Array, "... D"],
    previous: Int[Array, "..."],
) -> tuple[Float[Array, "... R"] | None, Array | None]:
    """What ``w2`` is applied to, None without a head; next state."""
    if weights.markov is None:
        return None, state
    embedding = markov_embedding(weights.markov, previous)
    return rank_step(config, weights.markov, state, hidden, embedding)


def rank_block(
    config: DrafterConfig,
    head: MarkovHead,
    hidden: Float[Array, "... G D"],
    embedding: Float[Array, "... G R"],
) -> Float[Array, "... G R"]:
    """``rank_step`` along a whole teacher-forced block, from a zero state."""
    if config.markov_head_type != "rnn":
        return rank_step(config, head, None, hidden, embedding)[0]
    state = jnp.zeros_like(embedding[..., 0, :])
    ranked = []
    for j in range(hidden.shape[-2]):
        out, state = rank_step(config, head, state, hidden[..., j, :], embedding[..., j, :])
        ranked.append(out)
    return jnp.stack(ranked, axis=-2)


def rank_and_confidence(
    config: DrafterConfig,
    weights: DrafterWeights,
    hidden: Float[Array, "... G D"],
    previous: Int[Array, "... G"],
    *,
    detach: bool = False,
) -> tuple[Float[Array, "... G R"] | None, Float[Array, "... G"] | None]:
    """Teacher-forced walk short of the vocabulary: rank-space vectors and confidence logits.

    ``previous[..., j]`` is the true token before position j: the anchor, then its successors.
    With ``detach`` no gradient of the confidence reaches what the head reads.
    """
    ranked, embedding = None, None
    if weights.markov is not None:
        embedding = markov_embedding(weights.markov, previous)
        ranked = rank_block(config, weights.markov, hidden, embedding)
    if detach:
        hidden, embedding = jax.lax.stop_gradient((hidden, embedding))
    return ranked, _confidence(config, weights, hidden, embedding)


def walk_block(
    config: DrafterConfig,
    weights: DrafterWeights,
    hidden: Float[Array, "... G D"],
    previous: Int[Array, "... G"],
) -> tuple[Float[Array, "... G Vd"] | None, Float[Array, "... G"] | None]:
    """Teacher-forced walk: fp32 logit biases and confidence logits of all positions."""
    ranked, confidence = rank_and_confidence(config, weights, hidden, previous)
    if weights.markov is None:
        return None, confidence
    assert ranked is not None
    return vocabulary_logits(ranked, weights.markov.w2), confidence


def _confidence(
    config: DrafterConfig,
    weights: DrafterWeights,
    hidden: Float[Array, "... D"],
    embedding: Float[Array, "... R"] | None,
) -> Float[Array, "..."] | None:
    if weights.confidence is None:
        return None
    seen = embedding if config.confidence_head_with_markov else None
    return confidence_logit(weights.confidence, hidden, seen)
