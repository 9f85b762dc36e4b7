"""What an engine costs beside its step: against `Generator`, and the host's choice of a shape.

    python -m benchmarks.overheads --prompts gsm8k.jsonl --users 1 64 --json overheads.json

A step is timed while every request decodes and none joins or ends: no answer may stop, whatever it
says. An engine's is the time of its dispatches over their steps; that of `Generator`, whose calls
are one program from prompt to last token, is a long answer's time less a short one's, over the
steps between. Both run the same prompts with the same modes, in turn.

The choice is timed apart, without a device: confidences of a dispatch that has been read are taken
over (``learn``) and the next shape is chosen (``choose``), for random confidences.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.record import Record
from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.decode.setup import depth_caps, tables_for
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.served import served_step
from dspark_jax.engine.shapes import ShapeChoice, every_shape, paying_shapes
from dspark_jax.text.prompt_file import read_prompts

UNTIMED = 4
"""Calls of `Engine.step` left out after the last request has joined and before the first ends."""

CHOICES = 200
"""Choices that a median is of."""


@dataclasses.dataclass
class Options:
    """What to time.

    Attributes:
        prompts: JSON Lines with ``turns`` or ``prompt``.
        json: raw result.
        target: a name, folder, id or GGUF file.
        drafter: a name, folder or id.
        modes: of engine and generator; "compact" needs a cost table.
        users: requests decoding together.
        choices: requests that a shape is chosen for, where there is a cost table.
        cost_table: from ``dspark profile``.
        short: tokens of the short answers.
        long: tokens of the long ones.
        repeats: timings of each; all are kept.
        dtype: of weights and caches.
    """

    prompts: Path
    json: Path | None = None
    target: str = "smollm2-135m"
    drafter: str = "smollm2-135m-dspark"
    modes: tuple[Literal["off", "static", "compact"], ...] = ("off", "static")
    users: tuple[int, ...] = (1, 64)
    choices: tuple[int, ...] = (256, 1024)
    cost_table: Path | None = None
    short: int = 60
    long: int = 600
    repeats: int = 3
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


def endless(target: LoadedTarget) -> LoadedTarget:
    """The target, whose answers stop at no token."""
    return dataclasses.replace(target, stop_token_ids=())


def engine_step(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds of a step in which all of ``requests`` decode.

    Raises:
        RuntimeError: answers were over before the clock had been started.
    """
    numbers = [engine.add(request) for request in requests]
    short = RuntimeError("answers ended before a step was timed; wanted longer ones")
    try:
        while not all(engine.tokens(number) for number in numbers):
            engine.step()
    except KeyError:
        while engine.busy:
            engine.step()
        raise short from None
    ended = [engine.step() for _ in range(UNTIMED)]
    ends = [time.perf_counter()]
    while engine.busy and not any(ended):
        ended = [engine.step()]
        ends.append(time.perf_counter())
    while engine.busy:
        engine.step()
    # the last ones may have been dispatched with fewer requests
    ends = ends[: -UNTIMED - 1]
    if len(ends) < 2:
        raise short
    steps = engine.config.dispatch_steps(len(requests))
    return (ends[-1] - ends[0]) / (len(ends) - 1) / steps


def generator_step(
    generator: Generator, requests: Callable[[int], Sequence[Request]], short: int, long: int
) -> float:
    """Seconds of a step between ``short`` and ``long`` tokens of the same answers."""

    def run(tokens: int) -> tuple[float, int]:
        begin = time.perf_counter()
        answers = generator.generate(requests(tokens))
        return time.perf_counter() - begin, max(len(one.commits) for one in answers)

    (less, fewer), (more, many) = run(short), run(long)
    return (more - less) / (many - fewer)


def time_choice(
    target: LoadedTarget, drafter: LoadedDrafter, table: Path, users: int
) -> dict[str, Any]:
    """Microseconds of ``learn`` and ``choose`` for so many requests, medians."""
    config = EngineConfig(mode="compact", max_requests=users, cost_table=table)
    step = served_step(target, drafter, config)
    rows = config.row_counts(step.width, users)
    depths = depth_caps(None, step.depth, True)
    every = every_shape(rows, users, depths)
    buckets = dataclasses.replace(step, buckets=tuple(shape.rows for shape in every))
    costs = jax.device_get(tables_for(target, drafter, buckets, table, None, batch=users))
    shapes = paying_shapes(every, users, depths, costs)
    choice = ShapeChoice(users, step)
    random, slots = np.random.default_rng(0), np.arange(users)
    for slot in range(users):
        choice.begin(slot, 256, 100)
    learnt, chosen = [], []
    steps = config.dispatch_steps(users)
    confidences = (steps, users, step.depth)
    for _ in range(CHOICES):
        report: Any = SimpleNamespace(
            outcome=SimpleNamespace(
                count=np.ones((steps, users), np.int32),
                decision=SimpleNamespace(
                    depth=np.full(steps, step.depth),
                    confidence=random.uniform(0.3, 1.0, confidences).astype(np.float32),
                ),
            )
        )
        begin = time.perf_counter()
        choice.learn(slots, slots, report, np.full(users, 200), np.full(users, 150))
        between = time.perf_counter()
        choice.choose(shapes, users, costs, slots)
        learnt.append(between - begin)
        chosen.append(time.perf_counter() - between)
    return {
        "shapes": len(shapes),
        "steps_learnt": steps,
        "learn_us": 1e6 * statistics.median(learnt),
        "choose_us": 1e6 * statistics.median(chosen),
    }


def main(options: Options) -> int:
    """Time everything that was asked for, print a table, write the raw result."""
    dtype = jnp.dtype(options.dtype)
    target = load_target(options.target, dtype)
    drafter = load_drafter(
        options.drafter,
        (target.config, target.weights),
        dtype,
        stop_token_ids=target.stop_token_ids,
    )
    if "compact" in options.modes and options.cost_table is None:
        raise ValueError("mode compact is asked for without --cost-table; wanted a measured one")
    assert target.text is not None, "targets that are loaded by name have a tokenizer"
    lines = read_prompts(options.prompts)
    prompts = [
        target.text.chat_ids([{"role": "user", "content": line["turns"][0]}]) for line in lines
    ]
    target = endless(target)
    longest = max(map(len, prompts)) + options.long + 1

    def requests(users: int, tokens: int) -> list[Request]:
        params = SamplingParams(max_new_tokens=tokens, seed=0)
        return [Request(prompts[index % len(prompts)], params) for index in range(users)]

    facts = {"target": target.name, "drafter": drafter.name, "dtype": options.dtype}
    record = Record(options.json, **facts, short=options.short, long=options.long)
    for mode in options.modes:
        given: dict[str, Any] = {"cost_table": options.cost_table} if mode == "compact" else {}
        pair = (target, None if mode == "off" else drafter)
        engine = Engine(
            *pair,
            EngineConfig(
                mode=mode,
                max_requests=max(options.users),
                batch_tiers=tuple(sorted(options.users)),
                max_context=longest,
                prefix_reuse=False,
                **given,
            ),
        )
        engine.warmup()
        for users in options.users:
            with record.arm(mode=mode, users=users) as arm:
                generator = Generator(*pair, mode=mode, batch=users, max_context=longest, **given)
                asked = requests(users, options.long)
                engine_step(engine, asked)
                of_users = lambda tokens, users=users: requests(users, tokens)  # noqa: E731
                between = options.short, options.long
                generator_step(generator, of_users, *between)
                arm["engine_seconds"], arm["generator_seconds"] = [], []
                for _ in range(options.repeats):
                    arm["engine_seconds"].append(engine_step(engine, asked))
                    arm["generator_seconds"].append(generator_step(generator, of_users, *between))
                arm["ratio"] = statistics.median(arm["engine_seconds"]) / statistics.median(
                    arm["generator_seconds"]
                )
        del engine
    if options.cost_table is not None:
        for users in options.choices:
            with record.arm(mode="choice", users=users) as arm:
                arm |= time_choice(target, drafter, options.cost_table, users)
    _print(record)
    return record.finish()


def _print(record: Record) -> None:
    table = Table(box=None)
    for name in ("mode", "users", "engine ms", "generator ms", "ratio", "learn us", "choose us"):
        table.add_column(name)

    def text(arm: dict[str, Any], key: str, scale: float) -> str:
        value = arm.get(key)
        if isinstance(value, list):
            value = statistics.median(value) if value else None
        return "-" if value is None else f"{scale * value:.3f}"

    for arm in record.arms:
        table.add_row(
            arm["mode"],
            str(arm["users"]),
            text(arm, "engine_seconds", 1e3),
            text(arm, "generator_seconds", 1e3),
            text(arm, "ratio", 1),
            text(arm, "learn_us", 1),
            text(arm, "choose_us", 1),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
