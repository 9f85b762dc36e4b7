"""A target and a drafter whose next token depends on every cached row before it: paged toys.

The text's weighted sum picks a row of a table of logits. Sums are of small whole numbers, so
they are exact; one wrong, stale or missing cache row changes the answer.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.models.pages import PagePool, place
from dspark_jax.models.ragged import Mixed, Packed
from pallas_kernels.best_linear import best_token

_HERE = sys.modules[__name__]


@dataclasses.dataclass(frozen=True)
class SummingTargetConfig:
    """A target that sums its text."""

    vocab_size: int
    num_hidden_layers: int = 2
    hidden_size: int = 1

    @property
    def family(self) -> ModuleType:
        """This module."""
        return _HERE


@dataclasses.dataclass(frozen=True)
class SummingDrafterConfig:
    """A drafter that sums its text and has a table of its own."""

    vocab_size: int
    block_size: int
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


@flax.struct.dataclass
class SummingWeights:
    """``logits[h]`` scores the token after a text of sum h; a drafter has ``confidence[h]`` too."""

    logits: Float[Array, "V V"]
    confidence: Float[Array, "V"]
    draft_to_target: None = None


class Ledger(flax.struct.PyTreeNode):
    """Tokens by position, in pages; ``length`` is a target's only."""

    tokens: Float[Array, "B P"]
    length: Int[Array, "S"] | None = None
    table: Int[Array, "S C"] | None = None


def summing_weights(vocab_size: int, wrong: float, seed: int = 0) -> tuple[Any, Any]:
    """A target's and a drafter's weights; the drafter is wrong about a share of the sums.

    Its confidence is high where it is right, and not always low where it is wrong.
    """
    random = np.random.default_rng(seed)
    target = 3.0 * random.normal(size=(vocab_size, vocab_size))
    fails = random.uniform(size=vocab_size) < wrong
    drafter = np.where(fails[:, None], random.permuted(target, axis=1), target)
    confidence = np.where(fails, random.normal(size=vocab_size), 2.0)
    as_array = lambda values: jnp.asarray(values, jnp.float32)  # noqa: E731
    return (
        SummingWeights(as_array(target), jnp.zeros(vocab_size)),
        SummingWeights(as_array(drafter), as_array(confidence)),
    )


def sum_of(tokens: Any, vocab_size: int) -> int:
    """The sum of a whole text, by which its next token is drawn."""
    tokens = np.asarray(tokens, np.int64)
    return int(((np.arange(len(tokens)) % 7 + 1) * tokens).sum() % vocab_size)


def _weight(position: Array) -> Array:
    return position % 7 + 1


def _sums(ledger: Ledger, slot: Int[Array, "T"], end: Int[Array, "T"]) -> Int[Array, "T"]:
    """Weighted sum of rows ``0..end-1`` of each slot."""
    size = ledger.tokens.shape[1]
    capacity = size * (1 if ledger.table is None else ledger.table.shape[1])
    row = jnp.broadcast_to(jnp.arange(capacity), (slot.shape[0], capacity))
    page, offset = place(ledger.table, jnp.broadcast_to(slot[:, None], row.shape), row, size)
    tokens = ledger.tokens.at[page, offset].get(mode="fill", fill_value=jnp.nan)
    return jnp.where(row < end[:, None], tokens * _weight(row), 0.0).sum(axis=1).astype(jnp.int32)


def _write(ledger: Ledger, tokens: Array, slot: Array, position: Array) -> Ledger:
    page, offset = place(ledger.table, slot, position, ledger.tokens.shape[1])
    return ledger.replace(
        tokens=ledger.tokens.at[page, offset].set(tokens.astype(jnp.float32), mode="drop")
    )


def init_cache(config: Any, slots: int, capacity: int, dtype: Any) -> Ledger:
    """No rows committed."""
    return Ledger(jnp.zeros((slots, capacity)), jnp.zeros((slots,), jnp.int32))


def init_pages(config: Any, slots: int, pool: PagePool, dtype: Any) -> Ledger:
    """No rows committed, no pages given out."""
    length = jnp.zeros((slots,), jnp.int32)
    return Ledger(jnp.zeros((pool.count, pool.size)), length, pool.empty_table(slots))


def forward(
    config: SummingTargetConfig,
    weights: SummingWeights,
    cache: Ledger,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...],
) -> tuple[Array, Array, Ledger]:
    """The "hidden state" is the sum; every tap is the token."""
    assert cache.length is not None, "a drafter's ledger is no target's cache"
    slots = cache.length.shape[0]
    slot = packed.slot_of_row(slots)
    cache = _write(cache, packed.tokens, slot, packed.position)
    hidden = _sums(cache, slot, packed.position + 1)[:, None].astype(jnp.float32)
    tapped = jnp.repeat(packed.tokens[:, None].astype(jnp.float32), len(taps), axis=1)
    return hidden, tapped, cache


def unembed(config: SummingTargetConfig, weights: SummingWeights, hidden: Array) -> Array:
    """A row of the table."""
    return weights.logits[hidden[..., 0].astype(jnp.int32) % config.vocab_size]


def best_tokens(config: SummingTargetConfig, weights: SummingWeights, hidden: Array) -> Array:
    """The best of each row."""
    return best_token(unembed(config, weights, hidden))


def commit(config: Any, cache: Ledger, length: Int[Array, "S"]) -> Ledger:
    """Set the committed length."""
    return cache.replace(length=length)


def input_embedding(weights: SummingWeights) -> Array:
    """The table (a drafter of tables ignores it)."""
    return weights.logits


def output_embedding(weights: SummingWeights) -> Array:
    """The table (a drafter of tables ignores it)."""
    return weights.logits


def init_context(config: Any, slots: int, capacity: int, dtype: Any) -> Ledger:
    """No rows committed."""
    return Ledger(jnp.zeros((slots, capacity)))


def init_context_pages(config: Any, slots: int, pool: PagePool, dtype: Any) -> Ledger:
    """No rows committed, no pages given out."""
    return Ledger(jnp.zeros((pool.count, pool.size)), None, pool.empty_table(slots))


def commit_context(
    config: Any, weights: Any, context: Ledger, taps: Array, slot: Array, position: Array
) -> Ledger:
    """Write the tokens that the taps hold."""
    return _write(context, taps[:, 0], slot, position)


def block_hidden(
    config: SummingDrafterConfig,
    weights: Any,
    embed: Array,
    context: Ledger,
    anchor: Int[Array, "S"],
    start: Int[Array, "S"],
) -> Float[Array, "S G 2"]:
    """Sum of the context before ``start``, and each draft's own weight in the sum."""
    slot = jnp.arange(start.shape[0])
    before = jnp.broadcast_to(
        _sums(context, slot, start)[:, None], (slot.shape[0], config.block_size)
    )
    position = start[:, None] + jnp.arange(config.block_size)
    return jnp.stack([before, _weight(position)], axis=-1).astype(jnp.float32)


def base_logits(config: SummingDrafterConfig, weights: Any, head: Array, hidden: Array) -> Array:
    """All information sits in the walk."""
    return jnp.zeros((*hidden.shape[:2], config.vocab_size), jnp.float32)


def start_walk(config: Any, weights: Any, slots: int) -> Float[Array, "S"]:
    """Sum of the block so far."""
    return jnp.zeros((slots,), jnp.float32)


def walk(
    config: SummingDrafterConfig,
    weights: SummingWeights,
    state: Float[Array, "S"],
    hidden: Float[Array, "S 2"],
    previous: Int[Array, "S"],
) -> tuple[Array, Array]:
    """Add the previous token and look the sum up."""
    state = state + hidden[:, 1] * previous
    return weights.logits[_index(config, hidden, state)], state


def confidences(
    config: SummingDrafterConfig,
    weights: SummingWeights,
    hidden: Float[Array, "S C 2"],
    previous: Int[Array, "S C"],
) -> Array:
    """Look the sums up."""
    return weights.confidence[_index(config, hidden, jnp.cumsum(hidden[..., 1] * previous, axis=1))]


def _index(config: SummingDrafterConfig, hidden: Array, block: Array) -> Array:
    """Where the sum of context and block is found in a table."""
    return (hidden[..., 0] + block).astype(jnp.int32) % config.vocab_size


def to_target_ids(weights: Any, draft_ids: Array) -> Array:
    """The vocabularies are the same."""
    return draft_ids
