"""A long life of an engine: requests of random length that join, abort, preempt and drain to zero.

The pair is a toy whose every cache row counts, and the pool a third of what all requests want:

    python -m benchmarks.life_cycle --requests 2000 --json life.json

Fails if an answer differs from the one the request has alone, if a page or device memory is lost,
or if the engine does not come to an end. Greedy requests are judged in every mode, sampled ones in
"off" and with fixed k, where their tokens do not depend on their companions.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks.record import Record
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine
from dspark_jax.testing.summing import (
    SummingDrafterConfig,
    SummingTargetConfig,
    sum_of,
    summing_weights,
)

VOCAB, BLOCK, CONTEXT, STOP = 64, 7, 192, 5
ARMS: dict[str, dict[str, Any]] = {
    "compact": {"mode": "compact"},
    "threshold": {"mode": "compact", "threshold": 0.6},
    "cap-accept": {"mode": "cap-accept"},
    "fixed k": {"mode": "static", "k": 3},
    "off": {"mode": "off"},
}
SAMPLED = ("fixed k", "off")
MOST_STEPS = 100


def random_requests(count: int, sampled: bool, seed: int) -> list[Request]:
    """Random prompts; a third begin with one of four long prefixes."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(0, VOCAB, (4, 64)).tolist()
    made = []
    for index in range(count):
        prompt = random.integers(0, VOCAB, random.integers(1, 80)).tolist()
        if random.uniform() < 1 / 3:
            prompt = [*prefixes[random.integers(4)], *prompt[:40]]
        params = SamplingParams(
            temperature=float(random.choice([0.0, 0.7])) if sampled else 0.0,
            max_new_tokens=int(random.integers(1, 100)),
            seed=index,
        )
        made.append(Request(prompt, params))
    return made


def live_bytes() -> int:
    """Bytes of every array on the device, an engine's of before no longer among them."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def live(engine: Engine, asked: list[Request], seed: int) -> tuple[dict[int, Completion], int]:
    """Serve everything, aborting one request in ten; answers by place in ``asked``."""
    random = np.random.default_rng(seed)
    names: dict[int, int] = {}
    found: dict[int, Completion] = {}
    aborted = 0
    patience = MOST_STEPS * len(asked)

    def step() -> None:
        nonlocal patience
        patience -= 1
        if patience < 0:
            raise RuntimeError(f"{len(names) - len(found)} requests never end")
        found.update(engine.step())

    for place, request in enumerate(asked):
        names[engine.add(request)] = place
        for _ in range(random.integers(0, 3)):
            step()
        if random.uniform() < 0.1:
            victim = int(random.choice(list(names.keys() - found.keys())))
            found[victim] = engine.abort(victim)
            aborted += 1
    while engine.busy:
        step()
    return {names[index]: completion for index, completion in found.items()}, aborted


def differing(found: dict[int, Completion], wanted: list[tuple[int, ...]]) -> int:
    """Answers that are not those the requests have alone, aborted ones up to their end."""
    count = 0
    for place, one in found.items():
        whole = wanted[place]
        expected = whole[: len(one.token_ids)] if one.finish_reason == "abort" else whole
        count += one.token_ids != expected
    return count


def alone(
    asked: list[Request], target: LoadedTarget, drafter: LoadedDrafter, change: dict[str, Any]
) -> list[tuple[int, ...]]:
    """What each request is answered when nothing else is served: by a session, if any samples."""
    if any(request.params.temperature > 0 for request in asked):
        session = Generator(target, drafter, batch=16, max_context=CONTEXT, **change)
        return [one.token_ids for one in session.generate(asked)]
    best = np.asarray(target.weights.logits).argmax(axis=1)  # pyright: ignore
    answers = []
    for request in asked:
        text = list(request.prompt)
        limit = min(len(text) + request.params.max_new_tokens, CONTEXT)
        while len(text) < limit and (len(text) == len(request.prompt) or text[-1] != STOP):
            text.append(int(best[sum_of(text, VOCAB)]))
        answers.append(tuple(text[len(request.prompt) :]))
    return answers


def main(
    requests: int = 2000, modes: tuple[str, ...] = tuple(ARMS), json: Path | None = None
) -> int:
    """Serve this many requests in every one of these modes."""
    weights = summing_weights(VOCAB, wrong=0.3)
    target_config: Any = SummingTargetConfig(VOCAB)
    drafter_config: Any = SummingDrafterConfig(VOCAB, BLOCK)
    target = LoadedTarget(target_config, weights[0], None, (STOP,), "summing")
    drafter = LoadedDrafter(drafter_config, weights[1], "summing-drafter")
    record = Record(json, requests=requests)
    for name in modes:
        change = ARMS[name]
        with record.arm(mode=name) as arm:
            asked = random_requests(requests, name in SAMPLED, seed=0)
            wanted = alone(asked, target, drafter, change)
            engine = Engine(
                target,
                drafter,
                EngineConfig(
                    max_requests=16,
                    max_context=CONTEXT,
                    page_size=16,
                    pages=64,
                    batch_tiers=(4, 16),
                    **change,
                ),
            )
            engine.warmup(SamplingParams(temperature=float(name in SAMPLED)))
            live(engine, asked[:50], seed=1)
            bytes_before, pages_before = live_bytes(), engine.free_pages
            begin = time.perf_counter()
            found, aborted = live(engine, asked, seed=2)
            arm["seconds"] = round(time.perf_counter() - begin, 3)
            arm["answers"], arm["aborted"] = len(found), aborted
            arm["preemptions"], arm["reused_rows"] = engine.preemptions, engine.reused_rows
            arm["differing"] = differing(found, wanted)
            arm["bytes"] = live_bytes() - bytes_before
            arm["pages"] = engine.free_pages - pages_before
            if arm["differing"] or arm["bytes"] or arm["pages"] or len(found) != len(asked):
                raise RuntimeError(f"the life did not end where it began: {arm}")
            print(arm)
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
