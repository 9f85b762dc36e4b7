"""Tokens per second of plain and speculative decoding, at temperature 0, on held-out prompts.

Two figures an arm. "session" is what a user gets: prompts in, answers out, prefill and refills
included, compilation left out. "loop" is the device loop with every slot occupied: milliseconds
a step, beside the kernels it launches (``launches``) and the least time its reads take
(``occupied.floor_seconds``). Ratios are to mode "off" of the same run, batch and dtype.

``--throughput`` measures instead what makes training data: mode "off" at temperature 1.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import held_out
from benchmarks.launches import count_launches
from benchmarks.occupied import Chunk, Occupied, floor_seconds
from benchmarks.pair import open_drafter
from benchmarks.record import Record, require_tokens
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.config import Mode
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from train.config import Dtype

SETS = ("gsm8k", "math500", "mbpp", "humaneval")
CHUNKS = 3
"""Timed runs of the device loop, after one untimed; their median is reported."""

LIVE_ROWS = 1024
THROUGHPUT_CONTEXT = 768
THROUGHPUT_PROMPTS = 4096
THROUGHPUT_NEW_TOKENS = 512
THROUGHPUT_STEPS = 64


def main(
    prompts: Path,
    drafter: str | None = None,
    *,
    target: str = "smollm2-135m",
    batches: tuple[int, ...] = (1, 8, 64),
    max_new_tokens: int = 256,
    min_prompts: int = 16,
    dtypes: tuple[Dtype, ...] = ("bfloat16",),
    modes: tuple[Mode, ...] = ("off", "static", "compact"),
    k: int | None = None,
    cost_table: Path | None = None,
    launches: bool = True,
    throughput: bool = False,
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Measure decoding speed.

    Args:
        prompts: folder of prompt sets; their held-out part is answered.
        drafter: folder or name; not needed for mode "off" alone.
        target: name, folder, GGUF file or hub id.
        batches: requests decoded together; each answers twice as many prompts, or
            ``min_prompts`` if that is more.
        max_new_tokens: tokens of an answer at most.
        min_prompts: prompts at least.
        dtypes: of weights and caches; every mode runs in each.
        modes: what to measure.
        k: drafts in a block; the default is the drafter's block size.
        cost_table: measured costs for mode "compact".
        launches: count the kernels of a step.
        throughput: measure mode "off" at temperature 1 with 1024 live rows instead.
        output: where to write the raw result.

    Returns:
        0, or 1 if an arm failed.
    """
    record = Record(
        output,
        target=target,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        k=k,
        cpus=os.cpu_count(),
        xla_flags=os.environ.get("XLA_FLAGS"),
    )
    sets = held_out.load(prompts)
    for dtype in dtypes:
        loaded = load_target(target, jnp.dtype(dtype))
        if throughput:
            turns = held_out.interleave(sets)
            _throughput(record, loaded, dtype, held_out.encode(loaded, turns))
            continue
        pair = None if drafter is None else open_drafter(drafter, loaded)
        plain = {name: sets[name] for name in SETS}
        for batch in batches:
            turns = held_out.interleave(plain, max(2 * batch, min_prompts))
            encoded = held_out.encode(loaded, turns)
            record.facts.setdefault("prompt_ids", {})[str(batch)] = encoded
            for mode in modes:
                with record.arm(mode=mode, batch=batch, dtype=dtype) as entry:
                    session = Generator(
                        loaded,
                        None if mode == "off" else pair,
                        batch=batch,
                        max_context=held_out.context_for(encoded, max_new_tokens),
                        mode=mode,
                        k=None if mode == "off" else k,
                        cost_table=cost_table if mode == "compact" else None,
                    )
                    _measure(entry, session, encoded, max_new_tokens, launches)
    if throughput:
        _print_throughput(record)
    else:
        _add_ratios(record.arms)
        _print(record.arms)
    return record.finish()


def _measure(
    entry: dict[str, Any],
    session: Generator,
    encoded: Sequence[Sequence[int]],
    max_new_tokens: int,
    launches: bool,
) -> None:
    """Time one session, then its device loop."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    begin = time.perf_counter()
    session.warmup(params)
    entry["compile_seconds"] = round(time.perf_counter() - begin, 3)
    # a first real call: autotuned kernels are loaded, buffers exist
    few = dataclasses.replace(params, max_new_tokens=min(8, max_new_tokens))
    session.generate([Request(encoded[0], few)])
    begin = time.perf_counter()
    answers = session.generate([Request(ids, params) for ids in encoded])
    seconds = time.perf_counter() - begin
    tokens = require_tokens(answers)
    steps = sum(len(done.commits) for done in answers)
    entry["session"] = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "accepted_length": tokens / steps,
        "answers": [[len(done.token_ids), len(done.commits)] for done in answers],
    }
    loop = Occupied(session, 0.0)
    width = session.config.width
    steps = max(1, max_new_tokens // ((CHUNKS + 1) * width))
    chunks = loop.time(encoded[: session.batch], steps, CHUNKS)
    entry["loop"] = _loop_figures(chunks)
    entry["loop"]["floor_ms"] = _ms(
        floor_seconds(session.target, session.drafter, session.batch, entry["loop"]["mean_context"])
    )
    if launches:
        begin = time.perf_counter()
        entry["launches"] = dataclasses.asdict(count_launches(loop.compiled_text()))
        entry["launches"]["seconds"] = round(time.perf_counter() - begin, 3)


def _loop_figures(chunks: Sequence[Chunk]) -> dict[str, Any]:
    tokens = sum(chunk.tokens for chunk in chunks)
    step = statistics.median(chunk.seconds / chunk.steps for chunk in chunks)
    return {
        "step_ms": 1e3 * step,
        "tokens_per_second": statistics.median(chunk.tokens / chunk.seconds for chunk in chunks),
        "tokens_per_step": tokens / sum(chunk.steps for chunk in chunks),
        "mean_context": sum(chunk.context for chunk in chunks) / len(chunks),
        "chunks": [dataclasses.asdict(chunk) for chunk in chunks],
    }


def _throughput(
    record: Record, target: LoadedTarget, dtype: Dtype, encoded: Sequence[Sequence[int]]
) -> None:
    """Mode "off" at temperature 1: the loop with every row live, then a whole job."""
    fitting = [ids for ids in encoded if len(ids) + THROUGHPUT_NEW_TOKENS < THROUGHPUT_CONTEXT]
    session = Generator(
        target, mode="off", batch=LIVE_ROWS, max_context=THROUGHPUT_CONTEXT, chunk_steps=32
    )
    with record.arm(figure="loop", dtype=dtype) as entry:
        begin = time.perf_counter()
        session.warmup(SamplingParams(temperature=1.0))
        entry["compile_seconds"] = round(time.perf_counter() - begin, 3)
        count = THROUGHPUT_NEW_TOKENS // THROUGHPUT_STEPS - 1
        chunks = Occupied(session, 1.0).time(fitting, THROUGHPUT_STEPS, count)
        seconds = sum(chunk.seconds for chunk in chunks)
        entry["tokens_per_second"] = sum(chunk.tokens for chunk in chunks) / seconds
        entry["mean_context"] = sum(chunk.context for chunk in chunks) / len(chunks)
        entry["step_ms"] = 1e3 * seconds / sum(chunk.steps for chunk in chunks)
        entry["floor_ms"] = _ms(floor_seconds(target, None, LIVE_ROWS, entry["mean_context"]))
        entry["chunks"] = [dataclasses.asdict(chunk) for chunk in chunks]
    with record.arm(figure="job", dtype=dtype) as entry:
        requests = [
            Request(
                fitting[index % len(fitting)],
                SamplingParams(temperature=1.0, seed=index, max_new_tokens=THROUGHPUT_NEW_TOKENS),
            )
            for index in range(THROUGHPUT_PROMPTS)
        ]
        ended: list[tuple[float, int]] = []
        begin = time.perf_counter()

        def note(index: int, done: Completion) -> None:
            ended.append((time.perf_counter() - begin, len(done.token_ids)))

        answers = session.generate(requests, on_completion=note)
        seconds = time.perf_counter() - begin
        tokens = require_tokens(answers)
        middle = [count for at, count in ended if 0.25 <= at / seconds < 0.75]
        # cache rows summed over the tokens decoded: a token sees its prompt and those before it
        rows = sum(
            n * (len(done.prompt_ids) + n / 2) for done in answers for n in [len(done.token_ids)]
        )
        entry |= {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "middle_tokens_per_second": sum(middle) / (0.5 * seconds),
            "mean_context": rows / tokens,
            "prompts": len(answers),
        }


def _add_ratios(arms: Sequence[dict[str, Any]]) -> None:
    """Speed over that of mode "off": of the same batch and dtype, and of its fastest dtype."""
    measured = [arm for arm in arms if "session" in arm]
    plain = [arm for arm in measured if arm["mode"] == "off"]
    for arm in measured:
        for figure in ("session", "loop"):
            if figure not in arm:
                continue
            rivals = [
                (other["dtype"], other[figure]["tokens_per_second"])
                for other in plain
                if other["batch"] == arm["batch"] and figure in other
            ]
            mine = arm[figure]["tokens_per_second"]
            same = dict(rivals).get(arm["dtype"])
            arm[figure]["ratio_to_off"] = mine / same if same else None
            best = max((rate for _, rate in rivals), default=None)
            arm[figure]["ratio_to_fastest_off"] = mine / best if best else None


def _print(arms: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None)
    for name in ("mode", "batch", "dtype", "session tok/s", "× off", "× best off", "accepted"):
        table.add_column(name)
    for name in ("loop tok/s", "× off", "ms/step", "floor", "launches", "context", "compile s"):
        table.add_column(name)
    for arm in arms:
        session, loop = arm.get("session", {}), arm.get("loop", {})
        found = arm.get("launches")
        kernels = "-"
        if found:
            least, most = found["least"], found["most"]
            kernels = str(most) if least == most else f"{least}..{most}"
        table.add_row(
            arm["mode"] + (" FAILED" if "error" in arm else ""),
            str(arm["batch"]),
            arm["dtype"],
            _number(session.get("tokens_per_second"), 1),
            _number(session.get("ratio_to_off"), 2),
            _number(session.get("ratio_to_fastest_off"), 2),
            _number(session.get("accepted_length"), 2),
            _number(loop.get("tokens_per_second"), 1),
            _number(loop.get("ratio_to_off"), 2),
            _number(loop.get("step_ms"), 3),
            _number(loop.get("floor_ms"), 3),
            kernels,
            _number(loop.get("mean_context"), 0),
            _number(arm.get("compile_seconds"), 1),
        )
    console = Console(width=170)
    console.print(f"{jax.devices()[0].device_kind}, temperature 0")
    console.print(table)


def _print_throughput(record: Record) -> None:
    table = Table("figure", "dtype", "tokens/s", "middle", "mean context", "ms/step", "floor")
    for arm in record.arms:
        table.add_row(
            arm["figure"] + (" FAILED" if "error" in arm else ""),
            arm["dtype"],
            _number(arm.get("tokens_per_second"), 0),
            _number(arm.get("middle_tokens_per_second"), 0),
            _number(arm.get("mean_context"), 0),
            _number(arm.get("step_ms"), 2),
            _number(arm.get("floor_ms"), 2),
        )
    console = Console(width=120)
    console.print(f"{jax.devices()[0].device_kind}, mode off, temperature 1, {LIVE_ROWS} rows")
    console.print(table)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
