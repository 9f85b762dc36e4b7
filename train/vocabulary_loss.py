"""The vocabulary part of the objective, a chunk of rows at a time, gradients and all.

Logits of one chunk exist at one time. Their gradient is formed in the forward pass, while they
are there: nothing is computed twice, and the backward pass only scales what was kept.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.layers import linear
from train.losses import LossConfig, Rows, row_objective, vocabulary_rows


@flax.struct.dataclass
class VocabularyRows:
    """Draft rows in front of the vocabulary: P parts of N rows, hidden width D, Markov rank R.

    Parts live on different devices of a mesh (one part: one device). ``ranked`` is what the
    sequential head's ``w2`` is applied to, None without such a head. ``truth`` holds the target's
    final hidden states. Rows that are not ``live`` stand last, with ``weight`` 0.
    """

    hidden: Float[Array, "P N D"]
    ranked: Float[Array, "P N R"] | None
    truth: Float[Array, "P N D"]
    target_ids: Int[Array, "P N"]
    live: Bool[Array, "P N"]
    weight: Float[Array, "P N"]


def vocabulary_loss(
    rows: VocabularyRows,
    head: Float[Array, "V D"],
    w2: Float[Array, "V R"] | None,
    target_head: Float[Array, "V D"],
    config: LossConfig,
    chunk: int,
) -> tuple[Float[Array, ""], Rows]:
    """The vocabulary terms of the objective, summed under their weights, and each by row.

    Gradients reach ``hidden``, ``ranked`` and ``w2`` through the sum alone. Products run in the
    dtype of ``hidden`` and add up in fp32; softmax and losses are fp32.

    Args:
        rows: the draft rows.
        head: frozen matrix of the draft's base logits.
        w2: the sequential head's map from rank to vocabulary.
        target_head: matrix of the target's logits.
        config: the objective.
        chunk: rows of each part whose logits exist at one time.

    Raises:
        ValueError: ``chunk`` does not divide the number of rows.
    """
    count = rows.hidden.shape[1]
    if count % chunk:
        raise ValueError(f"a chunk of {chunk} rows does not divide {count} rows")
    frozen = jax.lax.stop_gradient((rows, head, target_head))
    return _loss((config, chunk), rows.hidden, rows.ranked, w2, *frozen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden, ranked, w2, rows, head, target_head):
    return _loss_forward(static, hidden, ranked, w2, rows, head, target_head)[0]


def _loss_forward(static, hidden, ranked, w2, rows, head, target_head):
    config, chunk = static
    dtype = hidden.dtype
    columns = head.astype(dtype)
    if w2 is not None:
        columns = jnp.concatenate([columns, w2.astype(dtype)], axis=1)
    target_columns = target_head.astype(dtype)
    start = None if w2 is None else jnp.zeros(w2.shape, jnp.float32)

    def live(of_w2: Array | None, part: VocabularyRows):
        x = part.hidden
        if part.ranked is not None:
            x = jnp.concatenate([x, part.ranked.astype(dtype)], axis=-1)
        draft = linear(x, columns, jnp.float32)
        target = linear(part.truth.astype(dtype), target_columns, jnp.float32)

        def objective(logits: Array) -> tuple[Array, Rows]:
            figures = vocabulary_rows(logits, target, part.target_ids, config)
            return jnp.sum(part.weight * row_objective(figures, config)), figures

        (total, figures), of_logits = jax.value_and_grad(objective, has_aux=True)(draft)
        of_logits = of_logits.astype(dtype)
        of_x = jnp.matmul(of_logits, columns, preferred_element_type=jnp.float32)
        if of_w2 is not None:
            of_w2 = of_w2 + jnp.einsum(
                "pnv,pnr->vr",
                of_logits,
                x[..., hidden.shape[-1] :],
                preferred_element_type=jnp.float32,
            )
        return of_w2, (total, figures, of_x.astype(dtype))

    def idle(of_w2: Array | None, part: VocabularyRows):
        shapes = jax.eval_shape(live, of_w2, part)[1]
        return of_w2, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def one_chunk(of_w2: Array | None, part: VocabularyRows):
        return jax.lax.cond(jnp.any(part.live), live, idle, of_w2, part)

    def split(leaf: Array) -> Array:
        parts = leaf.reshape(leaf.shape[0], -1, chunk, *leaf.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    def join(leaf: Array) -> Array:
        return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1, *leaf.shape[3:])

    of_w2, results = jax.lax.scan(one_chunk, start, jax.tree.map(split, rows))
    total = jnp.sum(results[0])
    figures, of_x = jax.tree.map(join, results[1:])
    of_hidden, of_ranked = jnp.split(of_x, [hidden.shape[-1]], axis=-1)
    if w2 is None or of_w2 is None or ranked is None:
        return (total, figures), (of_hidden, None, None)
    gradients = (of_hidden, of_ranked.astype(ranked.dtype), of_w2.astype(w2.dtype))
    return (total, figures), gradients


def _loss_backward(static, gradients, cotangents):
    of_total = cotangents[0]
    scaled = jax.tree.map(lambda leaf: (leaf * of_total).astype(leaf.dtype), gradients)
    return (*scaled, None, None, None)


_loss.defvjp(_loss_forward, _loss_backward)
