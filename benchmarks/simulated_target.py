"""SIMULATION of a larger target: random weights, acceptance and confidences replayed from traces.

    python -m benchmarks.traces --prompts PROMPTS --out TRACES
    python -m benchmarks.simulated_target --traces TRACES/traces-T0.jsonl \
        --calibration CALIBRATION --out simulated.json --figure simulated.png

What is real: every forward pass of target and drafter at their published shapes, the cost table,
the choice of shapes by lagged confidences (``engine.shapes``), allocation, packing, acceptance, and
the engine's loop of steps (``engine.lanes``).
What is not: what the weights say. Drafts are accepted and confident as those of the traces' pair
were (``benchmarks.replayed_pair``), so acceptance is that of another, smaller model.

A load is so many requests that decode all the time: none joins, none ends, and after every
dispatch caches go back to the length they began with. Requests start at evenly spaced places of
the traces, the same in every arm.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from benchmarks.record import Record
from benchmarks.replayed_pair import (
    ReplayedDrafterConfig,
    ReplayedDrafterWeights,
    ReplayedTargetConfig,
)
from benchmarks.traces import Traces, read_traces
from benchmarks.train_step import SHAPES, random_layers
from dspark_jax.bench.arms import ADAPTIVE, arm_config, chosen_arms
from dspark_jax.bench.summary import add_ratios
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.compiling import bound, compile_together, jit_for_rows
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.request import SamplingParams
from dspark_jax.decode.setup import cache_dtype, tables_for, variant
from dspark_jax.decode.state import State, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.engine import lanes
from dspark_jax.engine.config import GPU_STEPS, EngineConfig
from dspark_jax.engine.cost_profile import profile, write_table
from dspark_jax.engine.lanes import Lanes, Report, Starting
from dspark_jax.engine.served import served_step
from dspark_jax.engine.shapes import ShapeChoice, every_shape, paying_shapes
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.pages import PagePool, contiguous
from dspark_jax.models.weights import DenseWeights
from dspark_jax.schedule.cost import CostTables
from train.config import DrafterSection
from train.initialize import drafter_config, initial_weights

LABEL = "SIMULATION: random weights, replayed acceptance"
"""Stands on everything that this writes."""

STEPS = GPU_STEPS
"""Steps of a dispatch, as an engine takes them."""

UNTIMED, LEAST_DISPATCHES = 4, 6
"""Dispatches before the clock starts, until shapes are chosen by what was read, and after it."""

PAGE, PROMPT_ROWS = 64, 16

PAIRS: dict[str, tuple[DenseConfig, DrafterSection]] = {
    "qwen3-4b": (SHAPES["qwen3-4b"].target, SHAPES["qwen3-4b"].drafter),
    "tiny": (
        DenseConfig("qwen3", 8192, 64, 128, 2, 4, 2, 16, 1e6, 1e-6, True, 4096, qk_norm=True),
        DrafterSection(1, 7, (0,), 3, 16),
    ),
}
"""Targets and their drafters: the paper's smallest pair, and one to try the program with."""

_START = jax.jit(
    lanes.start, static_argnames=("config", "slots", "pool", "context", "dtype", "stop_width")
)
_ADMIT = jax.jit(lanes.admit, donate_argnums=0)


_RUN = jit_for_rows(lanes.run, static_argnames=("config", "steps"), donate_argnums=1)


def _program(step: StepConfig, users: int) -> Any:
    """The dispatch of so many users, compiled as an engine would."""
    return _RUN(users * step.width if step.shape is None else step.shape.rows)


def simulated_pair(
    name: str, shape: tuple[DenseConfig, DrafterSection], traces: Traces
) -> tuple[LoadedTarget, LoadedDrafter]:
    """Random bf16 weights that say what the traces say.

    Raises:
        ValueError: more blocks than the vocabulary has tokens to name them.
    """
    dense, section = shape
    blocks = len(traces.accepted)
    if blocks > dense.vocab_size:
        raise ValueError(
            f"the traces hold {blocks} blocks and {name} has a vocabulary of {dense.vocab_size}, "
            "a token for each: record fewer"
        )
    section = dataclasses.replace(section, block_size=traces.source.block_size)
    label = f"simulated {name}"
    head = 0.02 * jax.random.normal(
        jax.random.key(0), (dense.vocab_size, dense.hidden_size), jnp.bfloat16
    )
    norm = jnp.ones(dense.hidden_size, jnp.bfloat16)
    weights = DenseWeights(head, random_layers(dense), norm, None)
    drafter = drafter_config(section, LoadedTarget(dense, None, None, (), label))
    make = jax.jit(
        lambda key: jax.tree.map(
            lambda matrix: matrix.astype(jnp.bfloat16), initial_weights(drafter, key)
        )
    )
    replayed = ReplayedDrafterWeights(
        make(jax.random.key(1)),
        jnp.asarray(traces.logits, jnp.float32),
        jnp.asarray(traces.accepted, jnp.int32),
    )
    return (
        LoadedTarget(ReplayedTargetConfig(dense, blocks), weights, None, (), label),
        LoadedDrafter(ReplayedDrafterConfig(drafter), replayed, f"{label} drafter"),
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What runs a load: a step for every shape that a dispatch may have, or the only one."""

    steps: dict[Shape | None, StepConfig]
    tables: CostTables


class Sweep:
    """Loads of one pair, and the programs that run them.

    Args:
        users: loads, increasing.
        rows: cache rows of every request when a dispatch begins.
        temperature: the traces'; drafts and verification draw if it is above 0.
        calibration: STS temperatures of the traces' confidence head.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter,
        users: Sequence[int],
        *,
        rows: int,
        temperature: float,
        calibration: Path | None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.temperature, self.rows = temperature, rows
        width = drafter.config.block_size + 1
        longest = rows + (STEPS + 1) * width
        self.base = EngineConfig(
            max_requests=max(users),
            batch_tiers=tuple(users),
            max_context=-(-longest // PAGE) * PAGE,
            page_size=PAGE,
            prompt_width=PROMPT_ROWS,
            # no prompt is read here: a profile times one piece, the least it can
            max_batched_tokens=max(users) * width + PROMPT_ROWS,
            calibration=calibration,
        )

    def measure_costs(self, path: Path, progress: bool) -> None:
        """Write the pair's cost table for these loads, at about the contexts they are run at."""
        context = self.base.max_context
        assert context is not None, "it has been set above"
        share = min((self.rows + STEPS) / (context - self.drafter.config.block_size - 1), 1.0)
        config = dataclasses.replace(self.base, mode="compact")
        options: dict[str, Any] = {"temperature": self.temperature, "progress": progress}
        table = profile(self.target, self.drafter, config, shares=(share,), **options)
        write_table({"simulation": LABEL, **table}, path)

    def prepared(self, arm: str, users: int, costs: Path) -> Prepared:
        """What an engine of this arm steps by under this load."""
        config = arm_config(dataclasses.replace(self.base, cost_table=costs), arm)
        params = SamplingParams(temperature=self.temperature)
        step = variant(served_step(self.target, self.drafter, config), [params])
        drafter = self.drafter if step.drafts else None

        def tables(step: StepConfig) -> CostTables:
            given = config.cost_table, config.calibration
            return tables_for(self.target, drafter, step, *given, batch=users)

        if not step.adaptive:
            return Prepared({None: step}, tables(step))
        every = every_shape(config.row_counts(step.width, users), users, step.walk_caps)
        shapes = paying_shapes(every, users, step.walk_caps, tables(_with_rows(step, every)))
        steps: dict[Shape | None, StepConfig] = {
            shape: dataclasses.replace(step, shape=shape, walk_caps=()) for shape in shapes
        }
        return Prepared(steps, tables(_with_rows(step, shapes)))

    def compile(self, loads: Iterable[tuple[Prepared, int]], progress: bool) -> None:
        """Compile all dispatches of these loads side by side."""

        def lowered() -> Iterator[jax.stages.Lowered]:
            for prepared, users in loads:
                for step in prepared.steps.values():
                    state = bound(jax.eval_shape(functools.partial(self._occupied, step, users)))
                    weights, placed = self._fixed(step, users)
                    call = weights, state, prepared.tables, placed
                    program = _program(step, users)
                    yield program.lower(*call, config=step, steps=STEPS)

        compile_together(lowered(), progress)

    def run(self, prepared: Prepared, users: int, blocks: int) -> tuple[float, list[Report]]:
        """Seconds of dispatches that verify ``blocks`` windows or more, and their reports.

        As in an engine, a dispatch is launched before the one before it is read, and its shape is
        chosen by what had been read until then.
        """
        any_step = next(iter(prepared.steps.values()))
        state = bound(self._occupied(any_step, users))
        weights, placed = self._fixed(any_step, users)
        shapes = tuple(shape for shape in prepared.steps if shape is not None)
        costs = jax.device_get(prepared.tables)
        choice = ShapeChoice(users, any_step)
        everyone, unlimited = np.arange(users), np.iinfo(np.int32).max
        for slot in range(users):
            choice.begin(slot, unlimited, self.rows)
        rows = bound(jnp.full(users, self.rows, jnp.int32))
        reports: list[Report] = []
        begin = 0.0
        for index in range(UNTIMED + max(LEAST_DISPATCHES, -(-blocks // (users * STEPS)))):
            if index == UNTIMED:
                jax.block_until_ready((state, reports))
                begin = time.perf_counter()
            shape = choice.choose(shapes, users, costs, everyone) if shapes else None
            call = weights, state, prepared.tables, placed
            step = prepared.steps[shape]
            state, report = _program(step, users)(*call, config=step, steps=STEPS)
            for leaf in jax.tree.leaves(report):
                leaf.copy_to_host_async()
            # texts go on, and their caches are back where they began
            state = state.replace(cache=state.cache.replace(length=jnp.copy(rows)))
            if shapes and reports:
                read = jax.device_get(reports[-1])
                choice.learn(everyone, everyone, read, [unlimited] * users, [self.rows] * users)
            reports.append(report)
        jax.block_until_ready((state, reports))
        return time.perf_counter() - begin, jax.device_get(reports[UNTIMED:])

    def _fixed(self, step: StepConfig, users: int) -> tuple[Weights, Lanes]:
        """What every dispatch of a load takes: weights, and everyone in pages of their own."""
        weights = Weights(self.target.weights, self.drafter.weights if step.drafts else None)
        table = contiguous(users, self._context, PAGE)
        return weights, Lanes(None, jnp.ones(users, bool), table)

    @property
    def _context(self) -> int:
        assert self.base.max_context is not None, "it has been set above"
        return self.base.max_context

    def _occupied(self, step: StepConfig, users: int) -> State:
        """Everyone decodes, from evenly spaced places of the traces; cache rows hold zeros."""
        columns = self._context // PAGE
        state = _START(
            step,
            slots=users,
            pool=PagePool(users * columns, PAGE, columns),
            context=self._context,
            dtype=cache_dtype(self.target),
            stop_width=1,
        )
        everyone = jnp.arange(users, dtype=jnp.int32)
        zeros = jnp.zeros_like(everyone)
        starting = Starting(
            slots=everyone,
            anchor=jnp.asarray(starts(users, self.target.config.blocks)),
            rows=jnp.full_like(everyone, self.rows),
            steps=zeros,
            emitted=zeros,
            seeds=everyone,
            requests=make_requests(
                users,
                temperature=self.temperature,
                max_new_tokens=np.iinfo(np.int32).max,
                context=self._context,
            ),
        )
        return _ADMIT(state, starting)


def _with_rows(step: StepConfig, shapes: Sequence[Shape]) -> StepConfig:
    """The step for which a cost table of these shapes is laid out."""
    return dataclasses.replace(step, buckets=tuple(shape.rows for shape in shapes))


def starts(users: int, blocks: int) -> Int[np.ndarray, "S"]:
    """Blocks that requests begin with: evenly spaced over all of them."""
    return (np.arange(users, dtype=np.int64) * blocks // users).astype(np.int32)


def summarise(seconds: float, reports: Sequence[Report], users: int) -> dict[str, Any]:
    """Figures of a load.

    Raises:
        RuntimeError: a step in which somebody did not decode: nothing may be concluded from it.
    """
    outcome = jax.tree.map(lambda *parts: np.concatenate(parts), *[one.outcome for one in reports])
    counts, windows = outcome.count, outcome.window
    if not (counts > 0).all():
        raise RuntimeError("a request stopped decoding; wanted everyone live in every step")
    budgets = depths = np.zeros(len(counts))
    drafting = outcome.decision is not None
    if outcome.decision is not None:
        budgets, depths = outcome.decision.budget, outcome.decision.depth
    drafts = windows.sum()
    committed = np.minimum(outcome.accepted, windows).sum()
    return {
        "steps": len(counts),
        "seconds": seconds,
        "tokens": int(counts.sum()),
        "tokens_per_second": float(counts.sum() / seconds),
        "step_ms": 1e3 * seconds / len(counts),
        "accepted_length": float(counts.mean()),
        "budget_per_request": float(budgets.mean() / users),
        "mean_window": float(windows.mean() + 1),
        "window_p10": float(np.percentile(windows, 10) + 1),
        "window_p90": float(np.percentile(windows, 90) + 1),
        "mean_depth": float(depths.mean()),
        "skipped_draft_share": float((depths == 0).mean()) if drafting else None,
        "accepted_share": float(committed / drafts) if drafts else None,
    }


def main(
    traces: Path,
    *,
    out: Path,
    shape: str = "qwen3-4b",
    users: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512),
    arms: tuple[str, ...] = ("off", "k=3", "static", "compact"),
    calibration: Path | None = None,
    cost_table: Path | None = None,
    cache_rows: int = 256,
    blocks: int = 1024,
    figure: Path | None = None,
    progress: bool = False,
) -> int:
    """Run every arm under every load and write what came out.

    Args:
        traces: from benchmarks.traces.
        out: raw result, JSON; the cost table is written beside it.
        shape: qwen3-4b, or tiny to try it out.
        users: loads, increasing.
        arms: off, k=1, k=2, k=3, k=5, static, compact, cap-accept.
        calibration: STS temperatures of the confidence head that was recorded.
        cost_table: one that an earlier run has written, to spare the measurement.
        cache_rows: context of every request.
        blocks: windows of a load at least.
        figure: picture of budgets and throughput.
        progress: show bars.
    """
    if shape not in PAIRS:
        raise ValueError(f"shape is {shape!r}; wanted one of {', '.join(PAIRS)}")
    increasing = all(a < b for a, b in itertools.pairwise(users))
    if not users or users[0] < 1 or not increasing:
        raise ValueError(f"users are {users}; wanted increasing numbers of 1 or more")
    draw = None
    if figure is not None:
        from benchmarks.simulated_figure import draw
    found = read_traces(traces)
    target, drafter = simulated_pair(shape, PAIRS[shape], found)
    chosen = chosen_arms(arms, drafter, traces)
    record = Record(
        out,
        simulation=LABEL,
        shape=shape,
        traces={**dataclasses.asdict(found.source), "blocks": len(found.accepted)},
        trace_acceptance=found.acceptance.tolist(),
        calibration=None if calibration is None else calibration.name,
        users=users,
        cache_rows=cache_rows,
    )
    options: dict[str, Any] = {"rows": cache_rows, "calibration": calibration}
    sweep = Sweep(target, drafter, users, temperature=found.source.temperature, **options)
    table = cost_table or out.with_name(f"{out.stem}-costs.json")
    if cost_table is None and any(arm in ADAPTIVE for arm in chosen):
        with record.arm(arm="cost table"):
            sweep.measure_costs(table, progress)
    loads = list(itertools.product(chosen, users))
    programs = {load: sweep.prepared(*load, table) for load in loads}
    with record.arm(arm="compilation"):
        sweep.compile([(programs[load], load[1]) for load in loads], progress)
    for arm, count in loads:
        prepared = programs[arm, count]
        with record.arm(arm=arm, concurrency=count) as entry:
            shapes = [shape for shape in prepared.steps if shape is not None]
            entry["shapes"] = [dataclasses.asdict(shape) for shape in shapes]
            entry |= summarise(*sweep.run(prepared, count, blocks), count)
            add_ratios(record.arms)
    measured = [arm for arm in record.arms if "tokens_per_second" in arm]
    Console(width=120).print(_table(measured, f"{LABEL}; {shape}, {traces.name}"))
    if draw is not None and figure is not None and measured:
        source = found.source
        recorded = f"traces of {source.target} at temperature {source.temperature:g}"
        title = f"{LABEL}\n{shape} on {record.facts['device']}; {recorded}"
        print(f"figure written to {draw(figure, measured, title)}")
    return record.finish()


def _table(arms: Sequence[dict[str, Any]], title: str) -> Table:
    rows = Table(box=None, title=title)
    columns = {
        "tok/s": ("tokens_per_second", 1),
        "x off": ("ratio_to_off", 2),
        "x best fixed": ("ratio_to_best_fixed", 3),
        "step ms": ("step_ms", 2),
        "accepted": ("accepted_length", 2),
        "budget/request": ("budget_per_request", 2),
        "window": ("mean_window", 2),
        "depth": ("mean_depth", 2),
        "skips": ("skipped_draft_share", 2),
    }
    for name in ("arm", "users", *columns):
        rows.add_column(name, justify="left" if name == "arm" else "right")
    for arm in arms:
        cells = [
            "-" if arm[name] is None else f"{arm[name]:.{digits}f}"
            for name, digits in columns.values()
        ]
        rows.add_row(arm["arm"], str(arm["concurrency"]), *cells)
    return rows


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
