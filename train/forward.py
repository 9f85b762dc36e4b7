"""The drafter's training forward: blocks at anchors, their labels, and chunked losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from train.drafters import family_of
from train.losses import LossConfig, Rows, Terms, combine, position_weights
from train.sequence_experts import load_figures
from train.vocabulary_loss import VocabularyRows, vocabulary_loss


@flax.struct.dataclass
class Sequences:
    """A batch of documents with what the target said about them.

    ``taps`` are the concatenated layer outputs, ``last_hidden`` the states after the final norm.
    """

    tokens: Int[Array, "B K"]
    loss_mask: Bool[Array, "B K"]
    taps: Float[Array, "B K nDt"]
    last_hidden: Float[Array, "B K D"]


@flax.struct.dataclass
class Blocks:
    """Draft blocks of a batch: slot j of block a predicts token ``anchors[a] + j + 1``.

    ``previous`` is the true token before each slot, ``target_hidden`` the target's final hidden
    state at position ``anchors + j``; ``mask`` marks the supervised slots, a prefix of a block.
    """

    hidden: Float[Array, "B A G D"]
    previous: Int[Array, "B A G"]
    target_ids: Int[Array, "B A G"]
    target_hidden: Float[Array, "B A G D"]
    mask: Bool[Array, "B A G"]


def draft_blocks(
    config: Any,
    weights: Any,
    embed: Float[Array, "V D"],
    batch: Sequences,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Blocks, tuple[Float[Array, "X"], ...]]:
    """Hidden states and labels of the blocks at ``anchors``; dummies (``keep`` False) are masked.

    Context visible to a block: positions before its anchor. Masked labels are the last token
    of the sequence (past the end) or the first (dummies), as in DeepSpec. The second result is
    the load of the experts of each layer that has some.
    """
    sequences, length = batch.tokens.shape
    row = jnp.arange(sequences)[:, None, None]
    label = anchors[..., None] + 1 + jnp.arange(config.block_size)
    inside = label < length
    label = jnp.where(keep[..., None], jnp.minimum(label, length - 1), 0)
    supervised = inside & batch.loss_mask[row, label] & keep[..., None]
    mask = jnp.cumprod(supervised, axis=-1).astype(bool)

    target_ids = batch.tokens[row, label]
    anchor_token = batch.tokens[row[..., 0], anchors]
    previous = jnp.concatenate([anchor_token[..., None], target_ids[..., :-1]], axis=-1)
    block_tokens = jnp.full_like(previous, config.mask_token_id).at[..., 0].set(anchor_token)
    hidden, loads = family_of(config).block_hidden(
        config, weights, embed, batch.taps, block_tokens, anchors, keep
    )
    blocks = Blocks(
        hidden=hidden,
        previous=previous,
        target_ids=target_ids,
        target_hidden=batch.last_hidden[row, jnp.maximum(label - 1, 0)],
        mask=mask,
    )
    return blocks, loads


def block_logits(
    config: Any, weights: Any, head: Float[Array, "Vd D"], blocks: Blocks
) -> tuple[Float[Array, "B A G Vd"], Float[Array, "B A G"] | None]:
    """fp32 draft logits (sequential bias added, teacher forced) and confidence logits.

    Raises:
        ValueError: a pruned draft vocabulary, whose columns the target's logits do not share.
    """
    heads = family_of(config).heads(config, weights, head, blocks.hidden, blocks.previous)
    return heads.logits(), heads.confidence


def supervised_first(blocks: Blocks, parts: int) -> Blocks:
    """The blocks of a batch in ``parts`` rows of sequences, those with a supervised slot first.

    Short documents leave many dummies; gathered at the end they fill chunks that cost nothing.
    Sequences that live on one device stay on it: blocks move within their part alone.
    """

    def gather(leaf: Array) -> Array:
        return leaf.reshape(parts, -1, *leaf.shape[2:])

    def reorder(leaf: Array) -> Array:
        index = order.reshape(*order.shape, *(1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    gathered = jax.tree.map(gather, blocks)
    order = jnp.argsort(~gathered.mask[..., 0], axis=1, stable=True)
    return jax.tree.map(reorder, gathered)


def map_anchors(function: Callable[[Blocks], PyTree], blocks: Blocks, chunk: int) -> PyTree:
    """``function`` on ``chunk`` anchors at a time, results joined along the anchor axis.

    A chunk without a supervised slot is not computed; its results are 0.

    Raises:
        ValueError: ``chunk`` does not divide the number of anchors.
    """
    count = blocks.mask.shape[1]
    if count % chunk:
        raise ValueError(f"anchor_chunk {chunk} does not divide the {count} anchors")

    def unless_idle(part: Blocks) -> PyTree:
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, part)
        )
        return jax.lax.cond(jnp.any(part.mask), function, lambda _: zeros, part)

    def split(leaf: Array) -> Array:
        parts = leaf.reshape(leaf.shape[0], count // chunk, chunk, *leaf.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    def join(leaf: Array) -> Array:
        return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], count, *leaf.shape[3:])

    return jax.tree.map(join, jax.lax.map(unless_idle, jax.tree.map(split, blocks)))


def block_rows(
    config: Any,
    weights: Any,
    head: Float[Array, "Vd D"],
    blocks: Blocks,
    loss: LossConfig,
    chunk: int,
) -> Rows:
    """Loss figures of every slot; logits of ``chunk`` blocks a sequence exist at one time.

    Raises:
        ValueError: ``chunk`` does not divide the number of anchors; a pruned vocabulary.
    """
    _, anchors, width = blocks.mask.shape
    if anchors % chunk:
        raise ValueError(f"anchor_chunk {chunk} does not divide the {anchors} anchors")
    heads = family_of(config).heads(
        config, weights, head, blocks.hidden, blocks.previous, detach=loss.detach_confidence
    )

    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])

    rows = VocabularyRows(
        hidden=flat(heads.states),
        ranked=None if heads.ranked is None else flat(heads.ranked),
        truth=flat(blocks.target_hidden),
        target_ids=flat(blocks.target_ids),
        live=flat(blocks.mask),
        weight=flat(position_weights(blocks.mask, loss.decay)),
    )
    total, figures = vocabulary_loss(rows, heads.matrix, heads.w2, head, loss, chunk * width)
    by_block = jax.tree.map(lambda leaf: leaf.reshape(blocks.mask.shape), figures)
    return dataclasses.replace(by_block, confidence_logits=heads.confidence, weighted=total)


def drafter_terms(
    config: Any,
    weights: Any,
    embed: Float[Array, "V D"],
    head: Float[Array, "Vd D"],
    batch: Sequences,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    loss: LossConfig,
    chunk: int,
    parts: int = 1,
) -> Terms:
    """The objective and metrics of one batch; ``embed`` and ``head`` are the target's.

    Logits of ``B * chunk`` blocks exist at one time. ``parts`` is the number of devices that
    share the batch.
    """
    blocks, loads = draft_blocks(config, weights, embed, batch, anchors, keep)
    blocks = supervised_first(blocks, parts)
    rows = block_rows(config, weights, head, blocks, loss, len(batch.tokens) // parts * chunk)
    terms = combine(rows, blocks.mask, loss)
    metrics = terms.metrics | load_figures(loads)
    return dataclasses.replace(terms, metrics=metrics, expert_loads=loads)
