"""Drafters that know or deny a script: the oracle drafts it, the adversary never does.

Give the script as the target's own greedy continuation and the oracle is always right at
temperature 0, the adversary always wrong.
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

_HERE = sys.modules[__name__]


@dataclasses.dataclass(frozen=True)
class ScriptedConfig:
    """A drafter that reads its drafts off a script (plus ``shift`` modulo the vocabulary)."""

    vocab_size: int
    block_size: int
    shift: int = 0
    target_layer_ids: tuple[int, ...] = (0,)
    enable_confidence_head: bool = True

    @property
    def draft_vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.vocab_size

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


def oracle(vocab_size: int, block_size: int) -> ScriptedConfig:
    """Always drafts the script."""
    return ScriptedConfig(vocab_size, block_size)


def adversary(vocab_size: int, block_size: int) -> ScriptedConfig:
    """Never drafts the script."""
    return ScriptedConfig(vocab_size, block_size, shift=1)


@flax.struct.dataclass
class ScriptedWeights:
    """``script[s, i]`` is the token at position i of slot s's text; ``confidence`` a logit."""

    script: Int[Array, "S M"]
    confidence: Float[Array, ""]
    draft_to_target: None = None


def init_context(config: Any, slots: int, capacity: int, dtype: Any) -> Array:
    """A script needs no context."""
    return jnp.zeros((0,))


def commit_context(config: Any, weights: Any, context: Array, *rows: Array) -> Array:
    """A script needs no context."""
    return context


def block_hidden(
    config: ScriptedConfig,
    weights: ScriptedWeights,
    embed: Array,
    context: Any,
    anchor: Int[Array, "S"],
    start: Int[Array, "S"],
) -> Float[Array, "S G 1"]:
    """The scripted tokens after position ``start``, as numbers (exact below 2^24)."""
    at = start[:, None] + 1 + jnp.arange(config.block_size)
    tokens = jnp.take_along_axis(weights.script, at, axis=1, mode="clip")
    return ((tokens + config.shift) % config.vocab_size)[..., None].astype(jnp.float32)


def base_logits(config: ScriptedConfig, weights: Any, head: Array, hidden: Array) -> Array:
    """All mass on the script."""
    return 50.0 * jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), config.vocab_size)


def start_walk(config: Any, weights: Any, slots: int) -> None:
    """No state."""
    return None


def walk(
    config: Any, weights: ScriptedWeights, state: None, hidden: Array, previous: Array
) -> tuple[None, None]:
    """No bias."""
    return None, None


def confidences(config: Any, weights: ScriptedWeights, hidden: Array, previous: Array) -> Array:
    """The one confidence."""
    return jnp.broadcast_to(weights.confidence, previous.shape)


def to_target_ids(weights: Any, draft_ids: Array) -> Array:
    """The vocabularies are the same."""
    return draft_ids
