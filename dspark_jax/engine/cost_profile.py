"""Times the steps an engine takes on this machine, and writes them as a cost table.

Verification and drafting are timed apart, in loops on the device as they run while serving: for
every batch tier in each of its buckets, in full windows beside pieces of prompts, and over a grid
of contexts. Caches hold synthetic rows: time does not depend on what they say.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.compiling import bound, compile_together, jit_for_rows
from dspark_jax.decode import noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft, no_drafts
from dspark_jax.decode.request import MAX_STOP_IDS
from dspark_jax.decode.setup import cache_dtype, context_limit, depth_caps
from dspark_jax.decode.state import RUNNING, State
from dspark_jax.decode.step import Weights, verify_and_commit
from dspark_jax.engine import lanes
from dspark_jax.engine.config import EngineConfig, piece_tiers
from dspark_jax.engine.served import served_step
from dspark_jax.engine.shapes import every_shape
from dspark_jax.models.pages import PagePool, contiguous
from dspark_jax.models.ragged import rectangle
from dspark_jax.verify.accept import Sampling

REPEATS = 5
"""Timings of a size; the table holds their median."""

LEAST_SECONDS = 0.02
"""A timing covers about this long, so that the clock and the dispatch do not show."""

SHARES = (0.125, 0.5, 1.0)
"""Contexts measured: shares of the longest that every request can have."""


@functools.partial(jit_for_rows, static_argnames=("config", "pieces"), donate_argnums=1)
def _verify(
    weights: Weights,
    state: State,
    window: Any,
    steps: Any,
    *,
    config: StepConfig,
    pieces: tuple[int, int],
) -> State:
    """``steps`` verifications of the same windows at the same lengths.

    ``pieces`` counts pieces of prompts and the rows of one; they are read at the texts' ends.
    """
    sampling = Sampling(state.requests.temperature, state.requests.top_k, state.requests.top_p)
    room = jnp.full((state.slots,), config.width + 1, jnp.int32)
    length = state.cache.length
    prompts = None
    if pieces[0]:
        lane = jnp.arange(pieces[0], dtype=jnp.int32) % state.slots
        start = jnp.maximum(length[lane] - pieces[1], 0)
        prompts = rectangle(
            jnp.zeros(pieces, jnp.int32), start, jnp.full(pieces[:1], pieces[1], jnp.int32), lane
        )

    def one(_: Any, state: State) -> State:
        keys = noise.step_keys(state.requests.seed, state.steps) if config.sampled else None
        drafts = no_drafts(config, state.slots)
        after, _ = verify_and_commit(
            weights, state, sampling, keys, drafts, window, room, prompts, config
        )
        return after.replace(
            cache=after.cache.replace(length=length),
            active=jnp.ones_like(state.active),
            finish=jnp.full_like(state.finish, RUNNING),
        )

    return jax.lax.fori_loop(0, steps, one, state)


@functools.partial(jit_for_rows, static_argnames=("config", "depth"), donate_argnums=1)
def _draft(weights: Weights, state: State, steps: Any, *, config: StepConfig, depth: int) -> State:
    """``steps`` blocks walked to ``depth``, each from the last token of the one before."""

    def one(_: Any, state: State) -> State:
        keys = noise.step_keys(state.requests.seed, state.steps) if config.sampled else None
        drafts = draft(weights, state, keys, depth, config=config)
        return state.replace(anchor=drafts.tokens[:, depth - 1], steps=state.steps + 1)

    return jax.lax.fori_loop(0, steps, one, state)


def profile(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    config: EngineConfig,
    *,
    temperature: float = 0.0,
    shares: Sequence[float] = SHARES,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a cost table (``schedule.cost``) for engines of this configuration.

    Args:
        config: mode "compact"; its tiers, context and page size are those that are timed.
        temperature: above 0, drafts and verification draw, which costs time of its own.
        shares: contexts measured, as shares of the longest that every request can have.

    Returns:
        The content of the file; ``samples`` lists every timing behind a median.

    Raises:
        ValueError: a configuration whose steps do not compare costs.
    """
    step = served_step(target, drafter, config)
    if step.mode != "compact":
        raise ValueError(f'mode is {step.mode!r}; wanted "compact": costs decide its windows')
    context = context_limit(target.config, config.max_context)
    longest = context - step.width
    prompts = piece_tiers(config.pieces(step.width))
    depths = depth_caps(None, step.depth, priced=True)
    weights = Weights(target.weights, drafter.weights)
    samples: list[dict[str, Any]] = []

    def program(kind: str, batch: int, size: int, pieces: int = 0) -> tuple[Any, dict[str, Any]]:
        """Drafts to a depth, or a bucket beside prompts: a function of weights and state."""
        # whoever decides windows, these are the steps that run
        plain = dataclasses.replace(step, policy="lagged", threshold=None)
        arm = dataclasses.replace(plain, sampled=temperature > 0, filtered=False)
        if kind == "draft":
            # as beside full windows: with fewer rows verified an engine may compile it otherwise
            return _draft(batch * step.width), {"config": arm, "depth": size}
        shapes = every_shape(config.row_counts(step.width, batch), batch, depths)
        arm = dataclasses.replace(arm, shape=next(one for one in shapes if one.rows == size))
        window = jnp.asarray([len(part) - 1 for part in np.array_split(range(size), batch)])
        return _verify(size + pieces * config.prompt_width), {
            "window": window.astype(jnp.int32),
            "config": arm,
            "pieces": (pieces, config.prompt_width),
        }

    def occupied(batch: int, total: int) -> State:
        return _occupied(target, step, config, context, batch, total, temperature)

    def timed(batch: int, total: int, programs: Sequence[tuple[Any, ...]]) -> list[float]:
        """Median seconds of each of ``programs`` at ``total`` live rows."""
        runs = []
        for kind, *size in programs:
            run, given = program(kind, batch, *size)
            runs.append(functools.partial(_of_steps, run, weights, given))
        found = _seconds_a_step(runs, bound(occupied(batch, total)))
        for (kind, *size), seconds in zip(programs, found, strict=True):
            rows = size[0] + sum(size[1:]) * config.prompt_width
            one = {"kind": kind, "requests": batch, "size": rows, "rows": total}
            samples.append(one | {"seconds": seconds})
        return [statistics.median(seconds) for seconds in found]

    plans = []
    for batch in config.batches():
        # every anchor alone, whatever the tiers: what drafting is compared with
        buckets = sorted({batch, *config.row_counts(step.width, batch)})
        sizes = [(bucket, 0) for bucket in buckets]
        sizes += [(buckets[-1], pieces) for pieces in prompts]
        lengths = sorted({max(1, int(longest * share)) for share in shares})
        plans.append((batch, sizes, [batch * rows for rows in lengths]))

    def lowered() -> Iterator[jax.stages.Lowered]:
        for batch, sizes, _ in plans:
            state = bound(jax.eval_shape(lambda batch=batch: occupied(batch, 1)))
            drafting = (("draft", depth) for depth in depths)
            for kind, *size in (*drafting, *(("verify", *size) for size in sizes)):
                run, given = program(kind, batch, *size)
                yield run.lower(weights, state, steps=jnp.int32(1), **given)

    compile_together(lowered(), progress)
    tiers = []
    with Progress(disable=not progress) as bar:
        task = bar.add_task("timing", total=sum(len(contexts) for *_, contexts in plans))
        for batch, sizes, contexts in plans:
            rows = [bucket + pieces * config.prompt_width for bucket, pieces in sizes]
            programs = [("verify", *size) for size in sizes]
            programs += [("draft", depth) for depth in depths]
            found = []
            for total in contexts:
                found.append(timed(batch, total, programs))
                bar.advance(task)
            every = [list(seconds) for seconds in zip(*found, strict=True)]
            verify, drafted = every[: len(sizes)], every[len(sizes) :]
            walked = [sum(seconds) / sum(drafted[-1]) for seconds in drafted]
            tiers.append(
                {
                    "requests": batch,
                    "contexts": contexts,
                    "largest_bucket": batch * step.width,
                    "verify": {"tokens": rows, "seconds": verify},
                    "draft": drafted[-1],
                    "walk": {"depths": depths, "shares": walked},
                }
            )
    return {
        "device": jax.devices()[0].device_kind,
        "model": target.name,
        "dtype": np.dtype(cache_dtype(target)).name,
        "block_size": drafter.config.block_size,
        "tiers": tiers,
        "drafter": drafter.name,
        "temperature": temperature,
        "jax": jax.__version__,
        "samples": samples,
    }


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
    state = lanes.with_tables(state, table, jnp.arange(batch, dtype=jnp.int32))
    if hasattr(state.context, "table"):
        # a donated state must not hold one array twice
        state = state.replace(context=state.context.replace(table=jnp.copy(table)))
    return state


def _of_steps(run: Any, weights: Weights, given: dict[str, Any], state: State, steps: Any) -> State:
    return run(weights, state, steps=steps, **given)


def _seconds_a_step(runs: Sequence[Callable[[State, Any], State]], state: State) -> list[list]:
    """Timings of a step of each run, each over as many as take long enough to be measured.

    They take turns: a machine that is slow for a while is slow for all of them, and how they
    compare is what decides.
    """

    def wall(run: Callable[[State, Any], State], steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(run(state, jnp.int32(steps)))
        return time.perf_counter() - begin

    timed = []
    for run in runs:
        wall(run, 1)
        count = _steps(LEAST_SECONDS / wall(run, 1))
        # one step says little: the clock and the dispatch are in it, and what else came between
        timed.append((run, _steps(count * LEAST_SECONDS / wall(run, count))))
    turns = [[wall(run, steps) / steps for run, steps in timed] for _ in range(REPEATS)]
    return [list(seconds) for seconds in zip(*turns, strict=True)]


def _steps(count: float) -> int:
    return max(1, math.ceil(count))
