"""SIMULATION: a decode step of a target shaped as DeepSeek-V4-Flash, by part and by implementation.

    python -m benchmarks.deepseek_step --json step.json

What is real: the step that ``generate`` takes, at published widths in bf16, over caches full of
random rows: draft, packing, verification, acceptance, commit. What is not: the weights
(``benchmarks.deepseek_pair``), and that a few layers stand for all. Every request decodes all the
time, and after each timed run the caches go back to the length they began with.

Figures:

kernels   full windows (mode static) with the Pallas kernels and with sparse attention, indexer and
          top-k in pure JAX, by part of the step
windows   full windows against mode compact at a few mean windows: tokens a second
widths    fixed windows of 1 (mode off) to full
contexts  as kernels, at other contexts
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Table

from benchmarks.deepseek_pair import EASE, PAIRS, random_weights, replayed
from benchmarks.record import Record
from benchmarks.simulated_target import starts
from benchmarks.step_parts import part_seconds
from dspark_jax.compiling import jit_for_rows
from dspark_jax.decode import loop
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.state import State, init_state, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.schedule.cost import CostTables, no_costs
from pallas_kernels.choice import preferring

LABEL = "SIMULATION: DeepSeek-V4-Flash cut to 3 layers, random weights, replayed acceptance"
"""Stands on everything that this writes."""

Figure = Literal["kernels", "windows", "widths", "contexts"]

KERNELS, PLAIN = "kernels", "pure JAX"
COMPARED = ("sparse_mla", "indexer_logits", "top_k")
SCOPES = (
    "draft",
    "projections",
    "compressors",
    "indexer",
    "top_k",
    "sparse_attention",
    "streams",
    "experts",
    "head",
)
SPARSE = ("sparse_attention", "indexer", "top_k")
"""Parts that the kernels are for."""

CHUNKS, LEAST_STEPS, MOST_STEPS, CHUNK_SECONDS = 3, 2, 32, 0.3
PROFILED_STEPS = 2
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}
"""Compiled so, every kernel is launched by itself, and a profile says which instruction it is."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program.

    Attributes:
        figures: that read it.
        users: requests.
        context: cache rows of each when a timed run begins.
        rows: verified in a step over all requests.
        mode: of the step.
        width: most rows of a request.
        implementation: of what `COMPARED` names.
        profiled: whether its step is told apart by part.
    """

    figures: tuple[Figure, ...]
    users: int
    context: int
    rows: int
    mode: Literal["off", "static", "compact"]
    width: int
    implementation: str = KERNELS
    profiled: bool = False

    @property
    def names(self) -> dict[str, Any]:
        """What tells it from others in a record."""
        window = round(self.rows / self.users, 2)
        return {
            "mode": self.mode,
            "users": self.users,
            "context": self.context,
            "mean_window": window,
            "implementation": self.implementation,
        }


def cells(
    figures: Sequence[Figure],
    pair: DeepseekV4DrafterConfig,
    users: Sequence[int],
    context: int,
    windows: Sequence[float],
    contexts: Sequence[int],
) -> list[Cell]:
    """The programs of these figures, none twice."""
    full = pair.block_size + 1
    found: list[Cell] = []

    def add(figure: Figure, *args: Any, **fields: Any) -> None:
        cell = Cell((figure,), *args, **fields)
        for index, other in enumerate(found):
            if other.names == cell.names:
                found[index] = dataclasses.replace(
                    other,
                    figures=(*other.figures, figure),
                    profiled=other.profiled or cell.profiled,
                )
                return
        found.append(cell)

    def compared(figure: Figure, count: int, context: int) -> None:
        for one in (KERNELS, PLAIN):
            fields = {"implementation": one, "profiled": True}
            add(figure, count, context, count * full, "static", full, **fields)

    for figure in figures:
        for count in users:
            if figure == "kernels":
                compared(figure, count, context)
            elif figure == "contexts":
                for other in contexts:
                    compared(figure, count, other)
            elif figure == "windows":
                add(figure, count, context, count * full, "static", full)
            else:
                for width in range(1, full + 1):
                    mode = "off" if width == 1 else "static"
                    add(figure, count, context, count * width, mode, width)
        if figure == "windows":
            # large batches first: there rows are dear, and time may run out
            for window, count in itertools.product(windows, reversed(users)):
                add(figure, count, context, round(count * window), "compact", full)
    return found


def step_config(cell: Cell, pair: DeepseekV4DrafterConfig) -> StepConfig:
    """The step of a cell, greedy."""
    target, drafter = replayed(pair)
    config = StepConfig(
        target=target,
        drafter=None if cell.mode == "off" else drafter,
        mode=cell.mode,
        k=None if cell.mode == "off" else cell.width - 1,
        sampled=False,
        filtered=False,
    )
    if cell.mode == "compact":
        config = dataclasses.replace(config, shape=Shape(pair.block_size, cell.rows))
    return config


def needed_bytes(cell: Cell, pair: DeepseekV4DrafterConfig) -> dict[str, int]:
    """An estimate of what a cell keeps on the device, before anything is compiled.

    The step counts logits of target and drafter three times and scores of the indexer twice; in
    pure JAX also a request's index keys and the sorted scores, with their places.
    """
    config, target = step_config(cell, pair), pair.target
    state = jax.eval_shape(functools.partial(_occupied, config, cell.users, cell.context))
    logits = 4 * target.vocab_size * (cell.rows + cell.users * pair.block_size)
    entries = (cell.context + MOST_STEPS * cell.width) // 4
    scores = 4 * cell.rows * entries
    step = 3 * logits + 2 * scores
    if cell.implementation == PLAIN:
        step += 2 * cell.users * entries * target.index_head_dim + 4 * scores
    weights = jax.eval_shape(functools.partial(random_weights, pair))
    return {"weights": _bytes(weights), "state": _bytes(state), "step": step}


def check_memory(chosen: Sequence[Cell], pair: DeepseekV4DrafterConfig, limit: int | None) -> None:
    """Refuse cells that the device cannot hold.

    Raises:
        ValueError: names the cell, what it needs by part, and the limit.
    """
    if limit is None:
        return
    for cell in chosen:
        parts = needed_bytes(cell, pair)
        if sum(parts.values()) > limit:
            told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            raise ValueError(
                f"{cell.users} users at {cell.context} rows of context, {cell.implementation}, "
                f"need about {sum(parts.values()) / GIB:.1f} GiB ({told}); the device gives "
                f"{limit / GIB:.1f} GiB: ask for fewer --users, a shorter --context or fewer "
                "--experts"
            )


class Program:
    """Compiled steps of a cell."""

    def __init__(self, cell: Cell, pair: DeepseekV4DrafterConfig, weights: Weights) -> None:
        """Trace them; ``compile`` may run beside others."""
        self.cell, self.config = cell, step_config(cell, pair)
        self.weights = Weights(weights.target, weights.drafter if self.config.drafts else None)
        self.tables = _tables(self.config, cell.users)
        cells = self.config, cell.users, cell.context
        self._begin = _occupied.lower(*cells)
        run = functools.partial(_run, config=self.config, rows=cell.context)
        program = jit_for_rows(run, donate_argnums=1)(cell.rows)
        state = jax.eval_shape(functools.partial(_occupied, *cells))
        preferred = dict.fromkeys(COMPARED, "xla") if cell.implementation == PLAIN else {}
        with preferring(**preferred):
            self._step = program.lower(self.weights, state, self.tables, jnp.int32(1))

    def compile(self) -> Compiled:
        """What `measure` runs."""
        begin = time.perf_counter()
        step = self._step.compile()
        profiled = self._step.compile(NO_GRAPHS) if self.cell.profiled else None
        return Compiled(self._begin.compile(), step, profiled, time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Everyone in the middle of a text, the steps from there, and what compiling took.

    ``profiled`` are the same steps as a profile can read them.
    """

    begin: jax.stages.Compiled
    step: jax.stages.Compiled
    profiled: jax.stages.Compiled | None
    seconds: float


def measure(program: Program, compiled: Compiled) -> dict[str, Any]:
    """Time and tokens of a step, and seconds by part if the cell is profiled.

    Raises:
        RuntimeError: a step that committed less than a token a request.
    """

    def run(state: State, steps: int, step: Any = compiled.step) -> tuple[State, Array]:
        return step(program.weights, state, program.tables, jnp.int32(steps))

    def timed(state: State, steps: int) -> tuple[State, float, int]:
        begin = time.perf_counter()
        state, tokens = run(state, steps)
        total = int(tokens)
        return state, time.perf_counter() - begin, total

    state, _, _ = timed(compiled.begin(), 1)
    state, seconds, _ = timed(state, LEAST_STEPS)
    steps = int(np.clip(CHUNK_SECONDS * LEAST_STEPS / seconds, LEAST_STEPS, MOST_STEPS))
    taken, tokens = [], 0
    for _ in range(CHUNKS):
        state, seconds, count = timed(state, steps)
        taken.append(seconds / steps)
        tokens += count
    if tokens < CHUNKS * steps * program.cell.users:
        raise RuntimeError(
            f"{CHUNKS * steps} steps of {program.cell.users} requests committed {tokens} tokens; "
            "wanted one or more each"
        )
    step, each = statistics.median(taken), tokens / (CHUNKS * steps)
    figures: dict[str, Any] = {
        "step_ms": 1e3 * step,
        "steps_timed": CHUNKS * steps,
        "tokens_per_step": each,
        "tokens_per_second": each / step,
    }
    if compiled.profiled is not None:
        text = compiled.profiled.as_text()
        assert text is not None
        state, _ = run(state, PROFILED_STEPS, compiled.profiled)
        try:
            parts = part_seconds(
                lambda: run(state, PROFILED_STEPS, compiled.profiled), text, SCOPES
            )
        except RuntimeError as error:
            figures["parts_failed"] = str(error)
        else:
            by_part = {name: 1e3 * spent / PROFILED_STEPS for name, spent in parts.items()}
            figures["parts_ms"] = dict(sorted(by_part.items()))
            figures["busy_ms"] = sum(by_part.values())
    return figures


def part_ms(arm: dict[str, Any], name: str) -> float:
    """Milliseconds of a part of the target's step, or of all that the drafter does."""
    parts = arm["parts_ms"].items()
    return sum(ms for path, ms in parts if path.split("/")[0] == name)


def compare(arms: Sequence[dict[str, Any]]) -> None:
    """Ratios to the arm that differs in one thing alone, put into the arms.

    ``share_of_plain`` is time with the kernels over time in pure JAX: of the step, and of the
    sparse parts (demanded: a third at most). ``ratio_to_static`` is tokens a second over those of
    full windows.
    """
    for arm in arms:
        if "step_ms" not in arm:
            continue
        if arm["implementation"] == KERNELS:
            other = _twin(arms, arm, implementation=PLAIN)
            if other is not None:
                arm["share_of_plain"] = _shares(arm, other)
        full = max(one["mean_window"] for one in arms if one["mode"] == "static")
        other = _twin(arms, arm, mode="static", mean_window=full)
        if other is not None and arm["mode"] != "static":
            arm["ratio_to_static"] = arm["tokens_per_second"] / other["tokens_per_second"]
            arm["step_share_of_static"] = arm["step_ms"] / other["step_ms"]


def _shares(arm: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    shares = {"step": arm["step_ms"] / other["step_ms"]}
    if "parts_ms" in arm and "parts_ms" in other:
        for name in SPARSE:
            theirs = part_ms(other, name)
            if theirs:
                shares[name] = part_ms(arm, name) / theirs
        theirs = sum(part_ms(other, name) for name in SPARSE)
        if theirs:
            shares["sparse parts"] = sum(part_ms(arm, name) for name in SPARSE) / theirs
    return shares


def _twin(
    arms: Sequence[dict[str, Any]], arm: dict[str, Any], **changes: Any
) -> dict[str, Any] | None:
    names = ("mode", "users", "context", "mean_window", "implementation")
    wanted = {name: arm[name] for name in names} | changes
    same = [one for one in arms if all(one[name] == value for name, value in wanted.items())]
    return same[0] if same and "step_ms" in same[0] else None


def _run(
    weights: Weights,
    state: State,
    tables: CostTables,
    steps: Int[Array, ""],
    *,
    config: StepConfig,
    rows: int,
) -> tuple[State, Int[Array, ""]]:
    """Steps of ``generate``, and the tokens they committed; caches are back at ``rows`` then."""
    before = state.emitted.sum()
    state = loop.run_steps(weights, state, tables, steps, config=config)
    tokens = state.emitted.sum() - before
    length = jnp.full_like(state.cache.length, rows)
    state = state.replace(
        cache=state.cache.replace(length=length), emitted=jnp.zeros_like(state.emitted)
    )
    return state, tokens


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _occupied(config: StepConfig, users: int, context: int) -> State:
    """Requests at evenly spaced places of the replayed text, their caches full of random rows."""
    # a request that fills its context has ended
    room = (MOST_STEPS + 2) * config.width
    state = init_state(
        config, slots=users, capacity=context + room, max_tokens=room, dtype=jnp.bfloat16
    )
    leaves, structure = jax.tree.flatten((state.cache, state.context))
    keys = jax.random.split(jax.random.key(2, impl="rbg"), len(leaves))
    cache, rings = jax.tree.unflatten(
        structure,
        [
            jax.random.normal(key, leaf.shape, leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )
    length = jnp.full_like(cache.length, context)
    everyone = jnp.arange(users, dtype=jnp.int32)
    unlimited = np.iinfo(np.int32).max
    return loop.admit(
        state.replace(cache=cache.replace(length=length), context=rings),
        everyone,
        jnp.asarray(starts(users, config.target.blocks)),
        make_requests(users, max_new_tokens=unlimited, context=context + room),
    )


def _tables(config: StepConfig, users: int) -> CostTables:
    size = 0 if config.drafter is None else config.drafter.block_size
    tables = no_costs(users, size)
    depth = config.depth
    return dataclasses.replace(
        tables, temperatures=tables.temperatures[:, :depth], walk=tables.walk[:depth]
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _device_limit() -> int | None:
    """Bytes that the device gives this process; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def main(
    *,
    shape: str = "v4-flash",
    figures: tuple[Figure, ...] = ("kernels", "windows"),
    users: tuple[int, ...] = (1, 8, 64, 256),
    context: int = 16384,
    contexts: tuple[int, ...] = (4096, 65536),
    windows: tuple[float, ...] = (2.0, 3.0),
    experts: int | None = None,
    seconds: float = 150.0,
    memory_gib: float | None = None,
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Measure decode steps.

    Args:
        shape: v4-flash, or tiny to try it out.
        figures: kernels, windows, widths, contexts.
        users: requests decoding together.
        context: cache rows of every request.
        contexts: the same in figure "contexts".
        windows: mean rows a request verifies in mode compact, its anchor included.
        experts: routed experts of a layer instead of the shape's.
        seconds: begin no program after half of these; what was begun is measured, the rest told.
        memory_gib: instead of what the device gives.
        output: where to write the raw result.

    Raises:
        ValueError: a number out of its range; a batch that does not fit.
    """
    begin = time.perf_counter()
    if shape not in PAIRS:
        raise ValueError(f"shape is {shape!r}; wanted one of {', '.join(PAIRS)}")
    pair = PAIRS[shape]
    if experts is not None:
        pair = dataclasses.replace(
            pair, target=dataclasses.replace(pair.target, n_routed_experts=experts)
        )
    full = pair.block_size + 1
    for name, value in (("users", min(users)), ("context", context), ("contexts", min(contexts))):
        if value < 1:
            raise ValueError(f"{name} holds {value}; wanted 1 or more")
    if any(not 1 <= window <= full for window in windows):
        raise ValueError(f"windows are {windows}; wanted numbers from 1 to {full}, a full window")
    if pair.target.n_routed_experts < pair.target.num_experts_per_tok:
        raise ValueError(
            f"experts is {experts}; wanted {pair.target.num_experts_per_tok} or more, as many as a "
            "token is sent to"
        )
    chosen = cells(figures, pair, users, context, windows, contexts)
    limit = _device_limit() if memory_gib is None else round(memory_gib * GIB)
    check_memory(chosen, pair, limit)

    label = LABEL if shape == "v4-flash" else f"{LABEL}; not even its widths: shape {shape}"
    target = pair.target
    record = Record(
        output,
        simulation=label,
        shape=dataclasses.asdict(pair),
        experts=f"{target.n_routed_experts} of 256 a layer",
        layers=f"{target.num_hidden_layers} of 43, compress ratios {target.compress_ratios}",
        acceptance=f"conditional acceptance of a block drawn from Beta{EASE}",
        device_bytes=limit,
    )
    weights = jax.block_until_ready(random_weights(pair))
    with ThreadPoolExecutor() as workers:
        programs = _traced(chosen, pair, weights, workers, begin, seconds / 2)
        for cell, traced in programs:
            with record.arm(**cell.names) as arm:
                arm["figures"] = cell.figures
                arm["estimated_gib"] = round(sum(needed_bytes(cell, pair).values()) / GIB, 2)
                if traced is None:
                    arm["left_out"] = "out of time"
                    continue
                program, compiling = traced
                compiled = compiling.result()
                arm["compile_seconds"] = round(compiled.seconds, 1)
                arm["temporary_gib"] = round(_temporary(compiled.step) / GIB, 2)
                arm |= measure(program, compiled)
    compare(record.arms)
    _print(record.arms, label)
    if not any("step_ms" in arm for arm in record.arms):
        print(f"FAILED: nothing was measured in {seconds:g} s; wanted more --seconds")
        return 1
    return record.finish()


Compiling = tuple[Program, Future[Compiled]]


def _traced(
    chosen: Sequence[Cell],
    pair: DeepseekV4DrafterConfig,
    weights: Weights,
    workers: ThreadPoolExecutor,
    begin: float,
    seconds: float,
) -> Iterator[tuple[Cell, Compiling | None]]:
    """Every cell with its program on its way, all compiled before the first is given.

    None are begun later than ``seconds`` after ``begin``: compilers would disturb the clock.
    """
    found: list[tuple[Cell, Compiling | None]] = []
    for cell in chosen:
        if time.perf_counter() - begin > seconds:
            found.append((cell, None))
            continue
        program = Program(cell, pair, weights)
        found.append((cell, (program, workers.submit(program.compile))))
    for _, compiling in found:
        if compiling is not None:
            compiling[1].exception()
    yield from found


def _temporary(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program takes beside its arguments and results."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def _print(arms: Sequence[dict[str, Any]], label: str) -> None:
    console = Console(width=180)
    console.print(f"{jax.devices()[0].device_kind}. {label}")
    steps = Table(box=None, title=f"steps; {label}")
    for name in ("mode", "users", "context", "window", "implementation", "step ms", "tok/s"):
        steps.add_column(name)
    for name in ("tok/step", "x static", "step/static", "step/pure JAX", "sparse/pure JAX"):
        steps.add_column(name)
    parts = Table(box=None, title=f"ms of a step by part (profiled); {label}")
    shown = (*SCOPES, "rest")
    for name in ("users", "context", "implementation", *shown, "busy", "step"):
        parts.add_column(name)
    for arm in arms:
        shares = arm.get("share_of_plain", {})
        note = "failed" if "error" in arm else arm.get("left_out")
        steps.add_row(
            arm["mode"],
            str(arm["users"]),
            str(arm["context"]),
            f"{arm['mean_window']:g}",
            arm["implementation"],
            note or _number(arm.get("step_ms"), 2),
            _number(arm.get("tokens_per_second"), 0),
            _number(arm.get("tokens_per_step"), 1),
            _number(arm.get("ratio_to_static"), 3),
            _number(arm.get("step_share_of_static"), 3),
            _number(shares.get("step"), 3),
            _number(shares.get("sparse parts"), 3),
        )
        if "parts_ms" in arm:
            parts.add_row(
                str(arm["users"]),
                str(arm["context"]),
                arm["implementation"],
                *(f"{part_ms(arm, name):.3f}" for name in shown),
                f"{arm['busy_ms']:.2f}",
                f"{arm['step_ms']:.2f}",
            )
        elif "parts_failed" in arm:
            console.print(f"no parts of {arm['users']} users: {arm['parts_failed']}")
    console.print(steps)
    console.print(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
