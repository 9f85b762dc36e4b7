"""The device side of an engine: a few slots of the state step together. Pure functions.

The engine's state has one row a slot. A dispatch names its lanes, the slots that take part; their
rows are gathered into a smaller state, `decode_step` advances that, and the rows go back. Pages
and rings need no gathering: the lanes bring tables of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import Requests, State, init_state, request_keys
from dspark_jax.decode.step import Outcome, Weights, decode_step
from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import CostTables


@flax.struct.dataclass
class Lanes:
    """Who takes part in a dispatch of L lanes.

    Attributes:
        slots: slot of each lane, out of range in padding lanes; None when lane s is slot s.
        decoding: lanes that decode; the others only receive rows of prompts.
        table: pages of each lane, as many columns as the longest needs.
    """

    slots: Int[Array, "L"] | None
    decoding: Bool[Array, "L"]
    table: Int[Array, "L C"]


@flax.struct.dataclass
class Pieces:
    """Rows of prompts: ``count`` of P tokens from position ``start`` on, for each of B pieces."""

    tokens: Int[Array, "B P"]
    lane: Int[Array, "B"]
    start: Int[Array, "B"]
    count: Int[Array, "B"]


@flax.struct.dataclass
class Report:
    """Outcomes of the n steps of a dispatch, stacked along a leading axis.

    ``finish`` says after each step why a lane's request has ended; RUNNING if it has not.
    """

    outcome: Outcome
    finish: Int[Array, "n L"]


@flax.struct.dataclass
class Starting:
    """Requests that begin to decode. ``rows`` are in their pages; the rest continues a past run."""

    slots: Int[Array, "A"]
    anchor: Int[Array, "A"]
    rows: Int[Array, "A"]
    steps: Int[Array, "A"]
    emitted: Int[Array, "A"]
    seeds: Int[Array, "A"]
    requests: Requests


def start(
    config: StepConfig, *, slots: int, pool: PagePool, context: int, dtype: Any, stop_width: int
) -> State:
    """Empty slots over an empty pool. Answers are kept by the host: the state holds no record."""
    blank = init_state(
        config, slots=slots, capacity=1, max_tokens=1, dtype=dtype, stop_width=stop_width
    )
    cache = config.target.family.init_pages(config.target, slots, pool, dtype)
    drafted = None
    if config.drafts:
        drafted = config.drafter.family.init_context_pages(config.drafter, slots, pool, dtype)
    requests = dataclasses.replace(blank.requests, context=jnp.full((slots,), context, jnp.int32))
    state = blank.replace(cache=cache, context=drafted, requests=requests, logprobs=None)
    return with_tables(state, None, None)


def admit(state: State, starting: Starting) -> State:
    """Begin, or resume, decoding in these slots; out-of-range slots are ignored."""

    def put(old: Array, new: Array) -> Array:
        return old.at[starting.slots].set(new, mode="drop")

    requests = dataclasses.replace(starting.requests, seed=request_keys(starting.seeds))
    state = loop.admit(state, starting.slots, starting.anchor, requests)
    length = put(state.cache.length, starting.rows)
    return state.replace(
        cache=state.cache.replace(length=length),
        steps=put(state.steps, starting.steps),
        emitted=put(state.emitted, starting.emitted),
    )


def run(
    weights: Weights,
    state: State,
    tables: CostTables,
    lanes: Lanes,
    pieces: Pieces | None = None,
    *,
    config: StepConfig,
    steps: int,
) -> tuple[State, Report]:
    """So many steps of the lanes, each with these rows of prompts in it.

    A GPU's host looks at no condition in a loop of known length, and launches what comes next
    while it runs: going on after the last request has ended costs less than asking for it.
    """
    inner, prompts = _enter(state, lanes), None
    if pieces is not None:
        prompts = rectangle(pieces.tokens, pieces.start, pieces.count, pieces.lane)

    def step(inner: State, _: None) -> tuple[State, Report]:
        inner, outcome = decode_step(weights, inner, tables, config=config, prompts=prompts)
        return inner, Report(outcome, inner.finish)

    inner, report = jax.lax.scan(step, inner, None, length=steps)
    return _leave(state, inner, lanes), report


def with_tables(
    state: State, table: Int[Array, "L C"] | None, slots: Int[Array, "L"] | None
) -> State:
    """The state with these pages and slots of its lanes in its caches; None between dispatches.

    Target and drafter rows lie in the same pages, each in a pool of its own. What a cache keeps
    beside pages lies in a ring of the lane's slot. A cache that has neither gets neither.
    """

    def placed(cache: Any) -> Any:
        found = {"table": table, "ring_table": None if slots is None else slots[:, None]}
        found = {name: where for name, where in found.items() if hasattr(cache, name)}
        return cache.replace(**found) if found else cache

    return state.replace(cache=placed(state.cache), context=placed(state.context))


def _by_slot(state: State) -> dict[str, Any]:
    """Everything of a state that has one row a slot along its first axis."""
    names = ("requests", "anchor", "active", "finish", "steps", "emitted", "blocks")
    records = ("tokens", "windows", "accepted", "commits")
    rows = {name: getattr(state, name) for name in (*names, *records)}
    rows["length"] = state.cache.length
    rows["confidences"] = jnp.swapaxes(state.confidences, 0, 1)
    return rows


def _put_slots(state: State, rows: dict[str, Any]) -> State:
    length = rows.pop("length")
    confidences = jnp.swapaxes(rows.pop("confidences"), 0, 1)
    cache = state.cache.replace(length=length)
    return state.replace(cache=cache, confidences=confidences, **rows)


def _enter(state: State, lanes: Lanes) -> State:
    """The lanes' part of the state, with their pages."""
    slots = lanes.slots
    every = jnp.arange(state.slots, dtype=jnp.int32) if slots is None else slots
    inner = with_tables(state, lanes.table, every)
    if slots is not None:
        rows = jax.tree.map(
            # a padding lane shows some slot, and does not decode
            lambda every: jnp.take(every, slots, axis=0, mode="clip"),
            _by_slot(inner),
        )
        inner = _put_slots(inner, rows)
    return inner.replace(active=inner.active & lanes.decoding)


def _leave(state: State, inner: State, lanes: Lanes) -> State:
    """The whole state after its lanes have stepped."""
    inner = with_tables(inner, None, None)
    if lanes.slots is None:
        # who sat this one out, beside a warm-up for one, decodes on
        active = jnp.where(lanes.decoding, inner.active, state.active)
        return inner.replace(active=active)
    rows = jax.tree.map(
        lambda every, new: every.at[lanes.slots].set(new, mode="drop"),
        _by_slot(state),
        _by_slot(inner),
    )
    return _put_slots(inner, rows)
