"""A target and a drafter that are tables over the previous token: exactness tests in microseconds.

The drafter's proposal and its confidence are tables too, so a test can make confidences depend
on drafted tokens as strongly as it likes.
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

from dspark_jax.models.ragged import Packed
from pallas_kernels.best_linear import best_token

_HERE = sys.modules[__name__]


@dataclasses.dataclass(frozen=True)
class MarkovTargetConfig:
    """A target whose next-token logits are a row of a table."""

    vocab_size: int
    num_hidden_layers: int = 2
    hidden_size: int = 1

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


@dataclasses.dataclass(frozen=True)
class MarkovDrafterConfig:
    """A drafter whose logits and confidence logits are rows of tables."""

    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...] = ()
    enable_confidence_head: bool = True

    @property
    def draft_vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.vocab_size

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


@flax.struct.dataclass
class MarkovTargetWeights:
    """``logits[a]`` scores the token after ``a``."""

    logits: Float[Array, "V V"]


@flax.struct.dataclass
class MarkovDrafterWeights:
    """``logits[a]`` and ``confidence[j, a]`` (a logit) for draft position j after token a."""

    logits: Float[Array, "V V"]
    confidence: Float[Array, "G V"]
    draft_to_target: None = None


class MarkovCache(flax.struct.PyTreeNode):
    """Committed rows; a table needs no keys or values."""

    length: Int[Array, "S"]


def init_cache(config: Any, slots: int, capacity: int, dtype: Any) -> MarkovCache:
    """No rows committed."""
    return MarkovCache(length=jnp.zeros((slots,), jnp.int32))


def forward(
    config: MarkovTargetConfig,
    weights: MarkovTargetWeights,
    cache: MarkovCache,
    packed: Packed,
    *,
    taps: tuple[int, ...],
) -> tuple[Array, Array, MarkovCache]:
    """The "hidden state" is the one-hot token."""
    hidden = jax.nn.one_hot(packed.tokens, config.vocab_size, dtype=jnp.float32)
    return hidden, jnp.zeros((packed.tokens.shape[0], len(taps))), cache


def unembed(config: Any, weights: MarkovTargetWeights, hidden: Array) -> Array:
    """Rows of the table; ``highest`` precision keeps them exact."""
    return jnp.matmul(hidden, weights.logits, precision="highest")


def best_tokens(config: Any, weights: MarkovTargetWeights, hidden: Array) -> Array:
    """The best of each row."""
    return best_token(unembed(config, weights, hidden))


def commit(config: Any, cache: MarkovCache, length: Int[Array, "S"]) -> MarkovCache:
    """Set the committed length."""
    return cache.replace(length=length)


def input_embedding(weights: MarkovTargetWeights) -> Array:
    """The table (a drafter of tables ignores it)."""
    return weights.logits


def output_embedding(weights: MarkovTargetWeights) -> Array:
    """The table (a drafter of tables ignores it)."""
    return weights.logits


def init_context(config: Any, slots: int, capacity: int, dtype: Any) -> Array:
    """A table needs no context."""
    return jnp.zeros((0,))


def commit_context(config: Any, weights: Any, context: Array, *rows: Array) -> Array:
    """A table needs no context."""
    return context


def block_hidden(
    config: MarkovDrafterConfig,
    weights: Any,
    embed: Array,
    context: Any,
    anchor: Array,
    start: Array,
) -> Array:
    """The draft position, so that ``confidences`` knows it."""
    position = jnp.arange(config.block_size, dtype=jnp.float32)
    return jnp.broadcast_to(position[None, :, None], (anchor.shape[0], config.block_size, 1))


def base_logits(config: MarkovDrafterConfig, weights: Any, head: Array, hidden: Array) -> Array:
    """All information sits in the walk."""
    return jnp.zeros((*hidden.shape[:2], config.vocab_size), jnp.float32)


def start_walk(config: Any, weights: Any, slots: int) -> None:
    """No state."""
    return None


def walk(
    config: Any, weights: MarkovDrafterWeights, state: None, hidden: Array, previous: Array
) -> tuple[Array, None]:
    """Look the previous token up."""
    return weights.logits[previous], None


def confidences(
    config: Any, weights: MarkovDrafterWeights, hidden: Array, previous: Array
) -> Array:
    """Look position and previous token up."""
    return weights.confidence[hidden[..., 0].astype(jnp.int32), previous]


def to_target_ids(weights: Any, draft_ids: Array) -> Array:
    """The vocabularies are the same."""
    return draft_ids
