"""The state of a batch of requests between steps: one pytree, donated to every step."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dspark_jax.decode.config import StepConfig
from dspark_jax.verify.block_accept import OpenBlocks, no_blocks

RUNNING, STOP, LENGTH, CONTEXT = range(4)


@flax.struct.dataclass
class Requests:
    """What each slot's request asked for.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        seed: two words of key data; noise depends on nothing else of the request.
        max_new_tokens: tokens to emit at most.
        context: most tokens of prompt and answer together.
        stop_ids: token ids that end the answer; -1 where unused.
    """

    temperature: Float[Array, "S"]
    top_k: Int[Array, "S"]
    top_p: Float[Array, "S"]
    seed: UInt32[Array, "S 2"]
    max_new_tokens: Int[Array, "S"]
    context: Int[Array, "S"]
    stop_ids: Int[Array, "S X"]


@flax.struct.dataclass
class Logprobs:
    """Log-softmax of the raw target logits for every emitted token, and its best alternatives."""

    chosen: Float[Array, "S M"]
    top_ids: Int[Array, "S M n"]
    top_values: Float[Array, "S M n"]


class State(flax.struct.PyTreeNode):
    """Slots of a running batch. M bounds the tokens, and so the steps, of one answer.

    Attributes:
        cache: the target's cache; ``cache.length`` counts committed rows.
        context: the drafter's context cache (None in mode "off"); same committed rows.
        requests: parameters by slot.
        anchor: last committed token of each request; its row is not in the cache yet.
        active: slots that decode.
        finish: RUNNING, STOP, LENGTH or CONTEXT.
        steps: steps each request has taken; a key of its noise.
        emitted: tokens in ``tokens``.
        tokens: answers.
        windows: drafts verified at each step of the request.
        accepted: drafts that the verified rows accepted at that step, committed or not.
        commits: tokens committed at that step.
        confidences: what was known of calibrated confidences after each of the last ``lag`` steps;
            1 in a fresh slot.
        drafting: whether the last step that might draft did; decides with hysteresis.
        tick: steps of the batch; picks the oldest entry of ``confidences``.
        logprobs: None unless asked for.
        confidence_log: uncalibrated confidence logits of each step of the request, 0 past a
            walk's cap; None unless asked for.
        blocks: cut blocks whose full acceptance is still being followed; None unless asked for.
    """

    cache: Any
    context: Any
    requests: Requests
    anchor: Int[Array, "S"]
    active: Bool[Array, "S"]
    finish: Int[Array, "S"]
    steps: Int[Array, "S"]
    emitted: Int[Array, "S"]
    tokens: Int[Array, "S M"]
    windows: Int[Array, "S M"]
    accepted: Int[Array, "S M"]
    commits: Int[Array, "S M"]
    confidences: Float[Array, "lag S G"]
    drafting: Bool[Array, ""]
    tick: Int[Array, ""]
    logprobs: Logprobs | None
    confidence_log: Float[Array, "S M G"] | None = None
    blocks: OpenBlocks | None = None

    @property
    def slots(self) -> int:
        """Number of slots, S."""
        return self.anchor.shape[0]


@jax.jit
def request_keys(seeds: Int[Array, "S"]) -> UInt32[Array, "S 2"]:
    """Key data of integer seeds."""
    return jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed)))(seeds)


def make_requests(
    slots: int,
    *,
    temperature: float | Array = 0.0,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    seed: int | Array = 0,
    max_new_tokens: int | Array,
    context: int | Array,
    stop_ids: Array | None = None,
) -> Requests:
    """Parameters for ``slots`` requests; scalars apply to all, seeds count up from a scalar."""

    def each(value: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), (slots,))

    seeds = jnp.asarray(seed, jnp.uint32)
    if seeds.ndim == 0:
        seeds = seeds + jnp.arange(slots, dtype=jnp.uint32)
    if stop_ids is None:
        stop_ids = jnp.full((slots, 1), -1, jnp.int32)
    stop_ids = jnp.asarray(stop_ids, jnp.int32)
    if stop_ids.ndim == 1:
        stop_ids = jnp.broadcast_to(stop_ids, (slots, stop_ids.shape[0]))
    return Requests(
        temperature=each(temperature, jnp.float32),
        top_k=each(top_k, jnp.int32),
        top_p=each(top_p, jnp.float32),
        seed=request_keys(seeds),
        max_new_tokens=each(max_new_tokens, jnp.int32),
        context=each(context, jnp.int32),
        stop_ids=stop_ids,
    )


def init_state(
    config: StepConfig,
    *,
    slots: int,
    capacity: int,
    max_tokens: int,
    dtype: Any,
    stop_width: int = 1,
) -> State:
    """Empty slots. ``capacity`` bounds prompt and answer together, ``max_tokens`` the answer.

    The caches get ``config.width`` rows more than ``capacity``, so that a window at the end of
    the context is scratch like any other.
    """
    rows = -(-(capacity + config.width) // 64) * 64
    cache = config.target.family.init_cache(config.target, slots, rows, dtype)
    context = None
    if config.mode != "off":
        assert config.drafter is not None
        context = config.drafter.family.init_context(config.drafter, slots, rows, dtype)
    # every buffer its own array: a donated state must not hold one array twice
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    logprobs = None
    if config.logprobs is not None:
        logprobs = Logprobs(
            chosen=jnp.zeros((slots, max_tokens), jnp.float32),
            top_ids=ints(slots, max_tokens, config.logprobs),
            top_values=jnp.zeros((slots, max_tokens, config.logprobs), jnp.float32),
        )
    return State(
        cache=cache,
        context=context,
        requests=make_requests(
            slots,
            max_new_tokens=0,
            context=capacity,
            stop_ids=jnp.full((slots, stop_width), -1, jnp.int32),
        ),
        anchor=ints(slots),
        active=jnp.zeros((slots,), bool),
        finish=ints(slots),
        steps=ints(slots),
        emitted=ints(slots),
        tokens=ints(slots, max_tokens),
        windows=ints(slots, max_tokens),
        accepted=ints(slots, max_tokens),
        commits=ints(slots, max_tokens),
        confidences=jnp.ones((config.lag, slots, config.depth), jnp.float32),
        drafting=jnp.ones((), bool),
        tick=jnp.zeros((), jnp.int32),
        logprobs=logprobs,
        confidence_log=jnp.zeros((slots, max_tokens, config.depth), jnp.float32)
        if config.record_confidences
        else None,
        blocks=no_blocks(slots, config.depth) if config.bound_blocks else None,
    )
