"""Runs every arm under every load: one engine an arm, the same prompts in the same order."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from dspark_jax.bench.apart import Turn, at_once
from dspark_jax.bench.arms import arm_config, check_arm
from dspark_jax.bench.load import closed_loop
from dspark_jax.bench.record import Record
from dspark_jax.bench.summary import summarise
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.figures import as_json

WARM_TOKENS = 8
"""Tokens of an answer in the load that is run before the one that is measured."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Prompts in the order they are asked in, and the workload of each."""

    prompts: Sequence[Sequence[int]]
    workloads: Sequence[str]

    def requests(self, count: int, params: SamplingParams) -> list[Request]:
        """The first ``count`` requests, beginning again where prompts end; seeds count up."""
        first = params.seed or 0
        return [
            Request(
                self.prompts[index % len(self.prompts)],
                dataclasses.replace(params, seed=(first + index) % 2**32),
            )
            for index in range(count)
        ]

    def names(self, count: int) -> list[str]:
        """Their workloads."""
        return [self.workloads[index % len(self.workloads)] for index in range(count)]


def requests_at(concurrency: int, rounds: int, least: int) -> int:
    """Requests of a load: ``rounds`` a user, ``least`` at least."""
    return max(rounds * concurrency, least)


def _say(line: str) -> None:
    print(line, flush=True)


def run_arms(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    base: EngineConfig,
    arms: Sequence[str],
    concurrency: Sequence[int],
    traffic: Traffic,
    params: SamplingParams,
    record: Record,
    *,
    rounds: int,
    least: int,
    repeats: int = 1,
    turn: Turn = at_once,
    tell: Callable[[str], None] = _say,
) -> None:
    """Measure, and add to ``record`` after every load of every arm.

    An arm that raises is recorded with its error, and the next one runs.

    Args:
        repeats: times that each load is run; `middle` is kept.
        turn: within it a load is run and recorded, once.

    Raises:
        ValueError: an arm or a request that could not run; nothing has been compiled then.
    """
    most = max(requests_at(users, rounds, least) for users in concurrency)
    asked = traffic.requests(min(most, len(traffic.prompts)), params)
    configs = {arm: arm_config(base, arm) for arm in arms}
    for config in configs.values():
        check_arm(target, drafter, config, asked)
    for arm, config in configs.items():
        engine = None
        begin = time.perf_counter()
        try:
            engine = Engine(target, drafter, config)
            engine.warmup(params)
        except Exception as error:
            traceback.print_exc()
            record.add({"arm": arm, "error": f"{type(error).__name__}: {error}"})
            tell(f"{arm}: FAILED, {error}")
            continue
        compiled = time.perf_counter() - begin
        for users in concurrency:
            count = requests_at(users, rounds, least)
            entry: dict[str, Any] = {}
            runs: list[dict[str, Any]] = []
            while len(runs) < repeats and "error" not in entry:
                entry = {"arm": arm, "concurrency": users}
                with turn(users):
                    try:
                        requests = traffic.requests(count, params)
                        few = dataclasses.replace(
                            params, max_new_tokens=min(WARM_TOKENS, params.max_new_tokens)
                        )
                        closed_loop(engine, traffic.requests(users, few), users)
                        engine.reset_metrics()
                        load = closed_loop(engine, requests, users)
                        run = summarise(load, traffic.names(count), engine.step_config.mode)
                        runs.append(run | {"metrics": as_json(engine.figures())})
                        entry |= {"compile_seconds": round(compiled, 3), **middle(runs)}
                    except Exception as error:
                        traceback.print_exc()
                        entry["error"] = f"{type(error).__name__}: {error}"
                    record.add(entry)
            rate = entry.get("tokens_per_second")
            said = f"{rate:.1f} tok/s" if rate else f"FAILED, {entry['error']}"
            tell(f"{arm} at {users}: {said}")
            if "error" in entry:
                break  # what an engine holds after an error is unknown
        # the caches go before the next arm's come
        del engine
        gc.collect()


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of middle throughput, the slower of two, with what each of them reached."""
    rates = [run["tokens_per_second"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))] | {"every_tokens_per_second": rates}
