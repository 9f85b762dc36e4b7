"""A target and drafter that compute in earnest and say what recorded blocks say.

A wrapper around a real pair. Forward passes, products and caches are those of the pair inside;
then the logits of drafts and target are made to agree exactly as often as they did in blocks
recorded elsewhere, and the confidence head gives the logits recorded there. So a step takes the
time that it takes, and budgets, windows and acceptance are those of the recorded pair.

Blocks 0..N-1 are recorded at consecutive positions of one text after the other
(``benchmarks.traces``), and token n stands for the position of block n. The text goes on n, n+1,
..., and after N-1 from 0 again: that is what the target always says, whatever the mode. A block
drafted behind token n is right ``accepted[n]`` times and then repeats its last token, which is
wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import Mixed, Packed
from pallas_kernels.best_linear import best_token

_HERE = sys.modules[__name__]

FORCE = 1e4
"""Added to the logit of the token that is to be said; random weights give logits of a few units."""

DIGITS, BASE = 3, 256
"""Tokens travel through the hidden states: digits of this base are exact in bf16."""


@dataclasses.dataclass(frozen=True)
class ReplayedTargetConfig:
    """The target ``inner``, which says the text of ``blocks`` tokens. Its weights are inner's."""

    inner: DenseConfig | DeepseekV4Config
    blocks: int

    @property
    def vocab_size(self) -> int:
        """Inner's."""
        return self.inner.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Inner's."""
        return self.inner.max_position_embeddings

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


@dataclasses.dataclass(frozen=True)
class ReplayedDrafterConfig:
    """The drafter ``inner``, whose drafts and confidences follow the record."""

    inner: DrafterConfig | DeepseekV4DrafterConfig
    enable_confidence_head: bool = True

    @property
    def block_size(self) -> int:
        """Inner's."""
        return self.inner.block_size

    @property
    def vocab_size(self) -> int:
        """Inner's."""
        return self.inner.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """Inner's."""
        return self.inner.draft_vocab_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Inner's."""
        return self.inner.target_layer_ids

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


@flax.struct.dataclass
class ReplayedDrafterWeights:
    """Weights of the drafter inside, and the record of N blocks.

    Attributes:
        inner: weights of the drafter inside.
        logits: uncalibrated confidence logits of each block.
        accepted: drafts accepted of each.
    """

    inner: Any
    logits: Float[Array, "N G"]
    accepted: Int[Array, "N"]
    draft_to_target: None = None


def successor(token: Int[Array, "..."], blocks: int) -> Int[Array, "..."]:
    """The token after this one in the text of ``blocks`` tokens."""
    return (token + 1) % blocks


def _saying(scores: Float[Array, "... V"], token: Int[Array, "..."]) -> Float[Array, "... V"]:
    """``scores`` with ``token`` far ahead; what they were still counts, so it is computed."""
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return scores + jnp.where(column == token[..., None], FORCE, 0.0)


def init_cache(config: ReplayedTargetConfig, slots: int, capacity: int, dtype: Any) -> Any:
    """Inner's."""
    return config.inner.family.init_cache(config.inner, slots, capacity, dtype)


def init_pages(config: ReplayedTargetConfig, slots: int, pool: PagePool, dtype: Any) -> Any:
    """Inner's."""
    return config.inner.family.init_pages(config.inner, slots, pool, dtype)


def forward(
    config: ReplayedTargetConfig,
    weights: Any,
    cache: Any,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...],
) -> tuple[Array, Array, Any]:
    """Inner's forward; the rows' tokens travel behind the hidden states."""
    inner = config.inner
    hidden, tapped, cache = inner.family.forward(inner, weights, cache, packed, taps=taps)
    places = BASE ** jnp.arange(DIGITS)
    digits = packed.tokens[:, None] // places % BASE
    return jnp.concatenate([hidden, digits.astype(hidden.dtype)], axis=-1), tapped, cache


def unembed(config: ReplayedTargetConfig, weights: Any, hidden: Float[Array, "T DX"]) -> Array:
    """Inner's logits, in which the token that comes next in the text is far ahead."""
    hidden, digits = hidden[..., :-DIGITS], hidden[..., -DIGITS:].astype(jnp.int32)
    token = (digits * BASE ** jnp.arange(DIGITS)).sum(axis=-1)
    logits = config.inner.family.unembed(config.inner, weights, hidden)
    return _saying(logits, successor(token, config.blocks))


def best_tokens(config: ReplayedTargetConfig, weights: Any, hidden: Float[Array, "T DX"]) -> Array:
    """The best of each row, out of its logits."""
    return best_token(unembed(config, weights, hidden))


def commit(config: ReplayedTargetConfig, cache: Any, length: Int[Array, "S"]) -> Any:
    """Inner's."""
    return config.inner.family.commit(config.inner, cache, length)


def input_embedding(weights: Any) -> Array:
    """Inner's."""
    return weights.embed


def output_embedding(weights: Any) -> Array:
    """Inner's."""
    return weights.head


def init_context(config: ReplayedDrafterConfig, slots: int, capacity: int, dtype: Any) -> Any:
    """Inner's."""
    return config.inner.family.init_context(config.inner, slots, capacity, dtype)


def init_context_pages(
    config: ReplayedDrafterConfig, slots: int, pool: PagePool, dtype: Any
) -> Any:
    """Inner's."""
    return config.inner.family.init_context_pages(config.inner, slots, pool, dtype)


def commit_context(
    config: ReplayedDrafterConfig,
    weights: ReplayedDrafterWeights,
    context: Any,
    taps: Array,
    slot: Array,
    position: Array,
) -> Any:
    """Inner's."""
    inner = config.inner
    with jax.named_scope("draft"):
        return inner.family.commit_context(inner, weights.inner, context, taps, slot, position)


def block_hidden(
    config: ReplayedDrafterConfig,
    weights: ReplayedDrafterWeights,
    embed: Array,
    context: Any,
    anchor: Int[Array, "S"],
    start: Int[Array, "S"],
) -> Float[Array, "S G D"]:
    """Inner's."""
    inner = config.inner
    with jax.named_scope("draft"):
        return inner.family.block_hidden(inner, weights.inner, embed, context, anchor, start)


def base_logits(
    config: ReplayedDrafterConfig, weights: ReplayedDrafterWeights, head: Array, hidden: Array
) -> Array:
    """Inner's."""
    with jax.named_scope("draft"):
        return config.inner.family.base_logits(config.inner, weights.inner, head, hidden)


def start_walk(config: ReplayedDrafterConfig, weights: ReplayedDrafterWeights, slots: int) -> Any:
    """Inner's state, the block's number once it is known, and the position."""
    return config.inner.family.start_walk(config.inner, weights.inner, slots), None, 0


def walk(
    config: ReplayedDrafterConfig,
    weights: ReplayedDrafterWeights,
    state: Any,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Array, Any]:
    """Inner's bias, in which the recorded draft is far ahead."""
    inner = config.inner
    walking, block, at = state
    blocks = weights.accepted.shape[0]
    if block is None:
        block = previous % blocks
    with jax.named_scope("draft"):
        bias, walking = inner.family.walk(inner, weights.inner, walking, hidden, previous)
    if bias is None:
        bias = jnp.zeros((previous.shape[0], inner.draft_vocab_size), jnp.float32)
    right = at < weights.accepted[block]
    drafted = jnp.where(right, successor(previous, blocks), previous)
    return _saying(bias, drafted), (walking, block, at + 1)


def confidences(
    config: ReplayedDrafterConfig,
    weights: ReplayedDrafterWeights,
    hidden: Float[Array, "S C D"],
    previous: Int[Array, "S C"],
) -> Float[Array, "S C"]:
    """The recorded ones of the block that the anchor names."""
    inner = config.inner
    recorded = weights.logits[previous[:, 0] % weights.accepted.shape[0], : previous.shape[1]]
    with jax.named_scope("draft"):
        computed = inner.family.confidences(inner, weights.inner, hidden, previous)
    if computed is None:
        return recorded
    # the head inside is computed, and heard only if it breaks
    return jnp.where(jnp.isnan(computed), computed, recorded)


def to_target_ids(weights: Any, draft_ids: Array) -> Array:
    """The vocabularies are the same."""
    return draft_ids
