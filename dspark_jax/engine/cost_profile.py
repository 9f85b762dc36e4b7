"""Times the steps an engine takes on this machine, and writes them as a cost table.

Verification and drafting are timed apart, in loops on the device as they run while serving, in
every bucket and over a grid of contexts. Caches hold synthetic rows: time does not depend on what
they say.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode import noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft, no_drafts
from dspark_jax.decode.request import MAX_STOP_IDS
from dspark_jax.decode.setup import cache_dtype, context_limit
from dspark_jax.decode.state import RUNNING, State
from dspark_jax.decode.step import Weights, verify_and_commit
from dspark_jax.engine import lanes
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import served_step
from dspark_jax.models.pages import PagePool, contiguous
from dspark_jax.verify.accept import Sampling

REPEATS = 5
"""Timings of a size; the table holds their median."""

LEAST_SECONDS = 0.02
"""A timing covers at least this long, so that the clock and the dispatch do not show."""

SHARES = (0.125, 0.5, 1.0)
"""Contexts measured: shares of the longest that every request can have."""


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def _verify(
    weights: Weights, state: State, window: Any, steps: Any, *, config: StepConfig
) -> State:
    """``steps`` verifications of the same windows at the same lengths."""
    sampling = Sampling(state.requests.temperature, state.requests.top_k, state.requests.top_p)
    room = jnp.full((state.slots,), config.width + 1, jnp.int32)
    length = state.cache.length

    def one(_: Any, state: State) -> State:
        keys = noise.step_keys(state.requests.seed, state.steps) if config.sampled else None
        drafts = no_drafts(config, state.slots)
        after, _ = verify_and_commit(
            weights, state, sampling, keys, drafts, window, room, None, config
        )
        return after.replace(
            cache=after.cache.replace(length=length),
            active=jnp.ones_like(state.active),
            finish=jnp.full_like(state.finish, RUNNING),
        )

    return jax.lax.fori_loop(0, steps, one, state)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def _draft(weights: Weights, state: State, steps: Any, *, config: StepConfig) -> State:
    """``steps`` full blocks, each from the last token of the one before."""

    def one(_: Any, state: State) -> State:
        keys = noise.step_keys(state.requests.seed, state.steps) if config.sampled else None
        drafts = draft(weights, state, keys, config.depth, config=config)
        return state.replace(anchor=drafts.tokens[:, -1], steps=state.steps + 1)

    return jax.lax.fori_loop(0, steps, one, state)


def profile(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    config: EngineConfig,
    *,
    temperature: float = 0.0,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a cost table (``schedule.cost``) for engines of this configuration.

    A token count that several batch tiers have a bucket for is timed with the most requests.

    Args:
        config: mode "compact"; its tiers, context and page size are those that are timed.
        temperature: above 0, drafts and verification draw, which costs time of its own.

    Returns:
        The content of the file; ``samples`` lists every timing behind a median.

    Raises:
        ValueError: a configuration whose steps do not compare costs.
    """
    step = served_step(target, drafter, config)
    if step.mode != "compact":
        raise ValueError(f'mode is {step.mode!r}; wanted "compact": costs decide its windows')
    context = context_limit(target.config, config.max_context)
    weights = Weights(target.weights, drafter.weights)
    longest = context - step.width
    rows = sorted({max(1, int(longest * share)) * config.max_requests for share in SHARES})
    sizes = requests_by_size(step, config)
    samples: list[dict[str, Any]] = []

    def timed(kind: str, size: int, batch: int, total: int) -> float:
        state = _occupied(target, step, config, context, batch, total, temperature)
        changed = {"sampled": temperature > 0, "filtered": False, "buckets": (size,)}
        arm = dataclasses.replace(step, **changed)
        if kind == "verify":
            window = jnp.asarray([len(part) - 1 for part in np.array_split(range(size), batch)])
            run = functools.partial(_verify, window=window.astype(jnp.int32), config=arm)
        else:
            run = functools.partial(_draft, config=arm)
        seconds = _seconds_a_step(lambda state, n: run(weights, state, steps=n), state)
        samples.append({"kind": kind, "size": size, "rows": total, "seconds": seconds})
        return statistics.median(seconds)

    verified = [(size, sizes[size]) for size in sorted(sizes)]
    drafted = [(batch, batch) for batch in config.batches()]
    grid = list(itertools.product((("verify", verified), ("draft", drafted)), rows))
    jobs = [(kind, size, batch, total) for (kind, each), total in grid for size, batch in each]
    found = {
        (kind, size, total): timed(kind, size, batch, total)
        for kind, size, batch, total in track(jobs, "timing", disable=not progress)
    }

    def table(kind: str, each: list[tuple[int, int]]) -> list[list[float]]:
        return [[found[kind, size, total] for total in rows] for size, _ in each]

    return {
        "device": jax.devices()[0].device_kind,
        "model": target.name,
        "dtype": np.dtype(cache_dtype(target)).name,
        "block_size": drafter.config.block_size,
        "contexts": rows,
        "verify": {
            "tokens": [size for size, _ in verified],
            "seconds": table("verify", verified),
        },
        "draft": {
            "requests": [size for size, _ in drafted],
            "seconds": table("draft", drafted),
        },
        "largest_bucket": verified[-1][0],
        "drafter": drafter.name,
        "temperature": temperature,
        "jax": jax.__version__,
        "samples": samples,
    }


def requests_by_size(step: StepConfig, config: EngineConfig) -> dict[int, int]:
    """Every row count that an engine compiles, and the most requests that it is compiled for."""
    sizes: dict[int, int] = {}
    for batch in config.batches():
        sizes |= dict.fromkeys(config.stepping(step, batch).buckets, batch)
    return sizes


def write_table(table: dict[str, Any], path: Path) -> None:
    """Write a profile where ``load_costs`` reads it."""
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _occupied(
    target: LoadedTarget,
    step: StepConfig,
    config: EngineConfig,
    context: int,
    batch: int,
    rows: int,
    temperature: float,
) -> State:
    """``batch`` requests that decode, with ``rows`` live rows between them, in their own pages."""
    columns = -(-context // config.page_size)
    state = jax.jit(
        lanes.start, static_argnames=("config", "slots", "pool", "context", "dtype", "stop_width")
    )(
        step,
        slots=batch,
        pool=PagePool(batch * columns, config.page_size, columns),
        context=context,
        dtype=cache_dtype(target),
        stop_width=MAX_STOP_IDS,
    )
    length = min(max(rows // batch, 1), context - step.width)
    everyone = jnp.full((batch,), length, jnp.int32)
    state = state.replace(
        cache=state.cache.replace(length=everyone),
        active=jnp.ones((batch,), bool),
        requests=state.requests.replace(
            max_new_tokens=jnp.full((batch,), context, jnp.int32),
            temperature=jnp.full((batch,), temperature, jnp.float32),
        ),
    )
    table = contiguous(batch, context, config.page_size)
    state = lanes.with_tables(state, table)
    if hasattr(state.context, "table"):
        # a donated state must not hold one array twice
        state = state.replace(context=state.context.replace(table=jnp.copy(table)))
    return state


def _seconds_a_step(run: Callable[[State, Any], State], state: State) -> list[float]:
    """Timings of a step, each over as many as take long enough to be measured."""

    def wall(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(run(state, jnp.int32(steps)))
        return time.perf_counter() - begin

    wall(1)
    steps = next(count for count in _doubling() if wall(count) > LEAST_SECONDS)
    return [wall(steps) / steps for _ in range(REPEATS)]


def _doubling() -> Iterator[int]:
    count = 1
    while True:
        yield count
        count *= 2
