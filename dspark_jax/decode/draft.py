"""Draft one block: parallel backbone, then the sequential walk that draws token by token."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode import noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import State
from pallas_kernels.best_linear import best_token


@flax.struct.dataclass
class Drafts:
    """Drafts of one step; positions past the walk's cap hold zeros.

    Attributes:
        tokens: ``[S, G]`` target ids.
        scores: ``[S, G, Vd]`` fp32 logits over temperature: the array the draws were made from,
            None when every request is greedy.
        logprob: ``[S, G]`` log q of the drawn token, from that same array; None likewise.
        confidence: ``[S, G]`` uncalibrated confidence logits; None without a head.
    """

    tokens: Int[Array, "S G"]
    scores: Float[Array, "S G Vd"] | None
    logprob: Float[Array, "S G"] | None
    confidence: Float[Array, "S G"] | None


def no_drafts(config: StepConfig, slots: int) -> Drafts:
    """The result of a step that does not draft."""
    return _pad(config, slots, [], [], [], None)


# jitted so that steps that differ in what they read of prompts share a trace
@functools.partial(jax.jit, static_argnames=("cap", "config"))
def draft(
    weights: Any, state: State, keys: Array | None, cap: int, *, config: StepConfig
) -> Drafts:
    """Draft ``cap`` tokens for every slot from its anchor.

    The backbone block keeps its trained width whatever the cap; the LM head and the sequential
    head run for ``cap`` positions. q_j = softmax((U_j + M_j) / T) in fp32, with no top-k or
    top-p: some acceptance is given away where the target uses them, never exactness.
    """
    drafter, family = config.drafter, config.drafter.family
    target = config.target.family
    if cap == 0:
        return no_drafts(config, state.slots)
    hidden = family.block_hidden(
        drafter,
        weights.drafter,
        target.input_embedding(weights.target),
        state.context,
        state.anchor,
        state.cache.length,
    )[:, :cap]
    head = target.output_embedding(weights.target)
    silent = keys is None and _walks_without_logits(family, weights.drafter, head, state.slots)
    base = None if silent else family.base_logits(drafter, weights.drafter, head, hidden)
    walk = family.start_walk(drafter, weights.drafter, state.slots)
    previous = state.anchor
    before, tokens, scores, logprobs = [], [], [], []
    for j in range(cap):
        before.append(previous)
        previous, score, logprob, walk = _position(
            weights.drafter,
            head,
            walk,
            hidden[:, j],
            None if base is None else base[:, j],
            previous,
            keys,
            j + 1,
            state.requests.temperature,
            drafter=drafter,
        )
        tokens.append(previous)
        scores.append(score)
        logprobs.append(logprob)
    # of the whole block at once: a product a position would cost a launch each
    confidence = family.confidences(drafter, weights.drafter, hidden, jnp.stack(before, axis=1))
    return _pad(config, state.slots, tokens, scores, logprobs, confidence)


# jitted so that the positions of a block are traced and lowered once; XLA sees them unrolled
@functools.partial(jax.jit, static_argnames="drafter")
def _position(
    weights: Any,
    head: Float[Array, "V D"],
    walk: Any,
    hidden: Float[Array, "S D"],
    base: Float[Array, "S Vd"] | None,
    previous: Int[Array, "S"],
    keys: Array | None,
    place: int | Int[Array, ""],
    temperature: Float[Array, "S"],
    *,
    drafter: Any,
) -> tuple[Int[Array, "S"], Array | None, Array | None, Any]:
    """The draft at ``place``, its scores and log q where it is drawn, and the walk.

    ``base`` is None where greedy requests are walked without their logits.
    """
    family = drafter.family
    if base is None:
        column, walk = family.best_position(drafter, weights, head, walk, hidden, previous)
        return family.to_target_ids(weights, column), None, None, walk
    bias, walk = family.walk(drafter, weights, walk, hidden, previous)
    logits = base if bias is None else base + bias
    score = logprob = None
    if keys is None:
        column = best_token(logits)
    else:
        greedy = temperature == 0
        score = logits / jnp.where(greedy, 1.0, temperature)[:, None]
        draw = noise.gumbel(keys, noise.DRAFT, place, score.shape[-1])
        column = best_token(jnp.where(greedy[:, None], score, score + draw))
        chosen = jnp.take_along_axis(score, column[:, None], axis=-1)[:, 0]
        logprob = chosen - jax.nn.logsumexp(score, axis=-1)
    return family.to_target_ids(weights, column), score, logprob, walk


def _walks_without_logits(family: Any, weights: Any, head: Array, slots: int) -> bool:
    ask = getattr(family, "walks_without_logits", None)
    return ask is not None and ask(weights, head, slots)


def _pad(
    config: StepConfig,
    slots: int,
    tokens: list[Array],
    scores: list[Any],
    logprobs: list[Any],
    confidence: Float[Array, "S C"] | None,
) -> Drafts:
    """Stack per-position results along axis 1 and fill the rest of the block with zeros."""

    def filled(columns: Array) -> Array:
        missing = config.depth - columns.shape[1]
        return jnp.pad(columns, ((0, 0), (0, missing), *((0, 0),) * (columns.ndim - 2)))

    def block(columns: list, tail: tuple[int, ...], dtype: Any) -> Array:
        if not columns:
            return jnp.zeros((slots, config.depth, *tail), dtype)
        return filled(jnp.stack(columns, axis=1))

    if confidence is None and config.drafter.enable_confidence_head:
        confidence = jnp.zeros((slots, 0), jnp.float32)

    return Drafts(
        tokens=block(tokens, (), jnp.int32),
        scores=block(scores, (config.drafter.draft_vocab_size,), jnp.float32)
        if config.sampled
        else None,
        logprob=block(logprobs, (), jnp.float32) if config.sampled else None,
        confidence=None if confidence is None else filled(confidence),
    )
