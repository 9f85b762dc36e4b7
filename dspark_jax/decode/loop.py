"""Fill slots with prompts and run steps on the device: pure functions, no host reads."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import RUNNING, Logprobs, Requests, State, init_state
from dspark_jax.decode.step import Weights, decode_step
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import CostTables


def clear(state: State, slots: Int[Array, "A"]) -> State:
    """Empty slots before their prefill; out-of-range slots are ignored."""
    length = state.cache.length.at[slots].set(0, mode="drop")
    return state.replace(
        cache=state.cache.replace(length=length),
        active=state.active.at[slots].set(False, mode="drop"),
    )


def prefill(
    weights: Weights,
    state: State,
    slots: Int[Array, "A"],
    tokens: Int[Array, "A P"],
    count: Int[Array, "A"],
    *,
    config: StepConfig,
) -> State:
    """Append the first ``count`` tokens of each row to its slot's caches.

    A prompt's last token is not prefilled: it is the anchor of the first step, which samples
    the first token of the answer. Padding requests have an out-of-range slot and count 0.
    """
    target = config.target.family
    start = jnp.take(state.cache.length, slots, mode="fill", fill_value=0)
    packed = rectangle(tokens, start, count, slots)
    _, taps, cache = target.forward(
        config.target, weights.target, state.cache, packed, taps=config.taps
    )
    context = state.context
    if config.mode != "off":
        context = config.drafter.family.commit_context(
            config.drafter,
            weights.drafter,
            context,
            taps,
            packed.slot_of_row(state.slots),
            packed.position,
        )
    length = state.cache.length.at[slots].set(start + count, mode="drop")
    return state.replace(cache=target.commit(config.target, cache, length), context=context)


def admit(
    state: State, slots: Int[Array, "A"], anchor: Int[Array, "A"], requests: Requests
) -> State:
    """Start decoding in prefilled slots, each from its ``anchor``, the last token of its prompt."""

    def put(old: Array, new: Any) -> Array:
        return old.at[slots].set(new, mode="drop")

    blocks = state.blocks
    if blocks is not None:
        blocks = blocks.replace(expected=put(blocks.expected, -1))
    return state.replace(
        blocks=blocks,
        requests=jax.tree.map(put, state.requests, requests),
        anchor=put(state.anchor, anchor),
        active=put(state.active, requests.max_new_tokens > 0),
        finish=put(state.finish, RUNNING),
        steps=put(state.steps, 0),
        emitted=put(state.emitted, 0),
        confidences=state.confidences.at[:, slots].set(1.0, mode="drop"),
    )


GPU_TURN = 4
"""Steps between two looks at whether anybody still decodes, for which a GPU's host waits."""


def steps_a_turn() -> int:
    """Steps between two looks at a loop's condition that suit the default backend."""
    return GPU_TURN if jax.default_backend() == "gpu" else 1


def run_steps(
    weights: Weights,
    state: State,
    tables: CostTables,
    steps: int | Int[Array, ""],
    keep: int | Int[Array, ""] = 0,
    *,
    config: StepConfig,
    turn: int = 1,
) -> State:
    """Decode until ``steps`` steps are done or no more than ``keep`` requests are active.

    That is looked at every ``turn`` steps, so there may be a few more.
    """

    def going(carry: tuple[State, Array]) -> Array:
        state, done = carry
        return (done < steps) & (state.active.sum() > keep)

    def step(state: State, _: None) -> tuple[State, None]:
        return decode_step(weights, state, tables, config=config)[0], None

    def body(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, done = carry
        state, _ = jax.lax.scan(step, state, None, length=turn)
        return state, done + turn

    return jax.lax.while_loop(going, body, (state, jnp.zeros((), jnp.int32)))[0]


@flax.struct.dataclass
class Generated:
    """Answers of a batch.

    Attributes:
        tokens: ``[S, M]``; the first ``count`` are real.
        count: ``[S]``.
        finish: ``[S]`` ``state.STOP``, ``LENGTH`` or ``CONTEXT``.
        steps: ``[S]`` steps taken.
        windows, accepted, commits: ``[S, M]`` per step (see ``State``).
        logprobs, confidence_log: None unless asked for (see ``State``).
    """

    tokens: Int[Array, "S M"]
    count: Int[Array, "S"]
    finish: Int[Array, "S"]
    steps: Int[Array, "S"]
    windows: Int[Array, "S M"]
    accepted: Int[Array, "S M"]
    commits: Int[Array, "S M"]
    logprobs: Logprobs | None
    confidence_log: Float[Array, "S M G"] | None


@functools.partial(jax.jit, static_argnames=("config", "max_tokens", "chunk"))
def generate(
    weights: Weights,
    prompts: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    requests: Requests,
    tables: CostTables,
    *,
    config: StepConfig,
    max_tokens: int,
    chunk: int = 256,
) -> Generated:
    """Answer a batch of prompts in one jitted call; may be called inside another ``jit``.

    Args:
        prompts: token ids, right-padded to one width.
        lengths: real tokens of each prompt, 1..P; nothing is checked here.
        requests: parameters by prompt; ``max_new_tokens`` at most ``max_tokens``.
        tables: costs and temperatures (``schedule.cost``).
        config: static description of the step.
        max_tokens: bound on answers.
        chunk: prompt tokens forwarded at once.
    """
    slots, width = prompts.shape
    state = init_state(
        config,
        slots=slots,
        capacity=width + max_tokens,
        max_tokens=max_tokens,
        dtype=config.target.family.input_embedding(weights.target).dtype,
        stop_width=requests.stop_ids.shape[1],
    )
    every = jnp.arange(slots, dtype=jnp.int32)
    for begin in range(0, width - 1, chunk):
        piece = prompts[:, begin : min(begin + chunk, width - 1)]
        count = jnp.clip(lengths - 1 - begin, 0, piece.shape[1])
        state = prefill(weights, state, every, piece, count, config=config)
    anchor = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    state = admit(state, every, anchor, requests)
    # every active request emits at least one token a step
    turn = steps_a_turn()
    state = run_steps(weights, state, tables, max_tokens, config=config, turn=turn)
    return Generated(
        tokens=state.tokens,
        count=state.emitted,
        finish=state.finish,
        steps=state.steps,
        windows=state.windows,
        accepted=state.accepted,
        commits=state.commits,
        logprobs=state.logprobs,
        confidence_log=state.confidence_log,
    )
