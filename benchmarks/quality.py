"""Accepted length of drafters on the held-out prompts, generated and teacher-forced.

Counting follows DeepSpec's evaluation: committed tokens a step over all steps of a set, bonus
included; a stop accepted inside a block counts the drafts up to it and no bonus. DeepSpec counts
tokens past the length limit, so steps whose window the limit cut short are left out here.
Its first token comes from the prefill and is outside the count; here a first step drafts and
verifies like any other and is counted (``accepted_length_after_first`` leaves it out).

An answer loops if its last 48 tokens repeat with a period of at most 16: drafting loops is easy,
so their share stands beside every length.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import held_out
from benchmarks.pair import open_drafter
from benchmarks.record import Record, require_tokens
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from train.config import Dtype
from train.data import TokenDataset, supervised_answer
from train.evaluate import evaluate

LOOP_TOKENS = 48
LOOP_PERIOD = 16
TEMPERATURES = (0.0, 1.0)
LENGTH = {"generated": "accepted_length", "teacher-forced": "expected_length"}
MACRO = (
    "accepted_length",
    "accepted_length_after_first",
    "accepted_length_not_looping",
    "looping",
    "expected_length",
    "conditional_acceptance",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One verification: drafts proposed and accepted, tokens committed."""

    proposed: int
    accepted: int
    committed: int


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last 48 tokens repeat with a period of at most 16."""
    tail = list(token_ids[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


def whole_steps(done: Completion, depth: int, max_new_tokens: int) -> list[Step]:
    """The steps of an answer that the length limit did not cut short, in order."""
    steps, emitted = [], 0
    for proposed, accepted, committed in zip(
        done.proposed, done.accepted, done.commits, strict=True
    ):
        if max_new_tokens - emitted > depth:
            steps.append(Step(proposed, min(accepted, proposed), committed))
        emitted += committed
    return steps


def generated_figures(
    answers: Sequence[Completion], depth: int, max_new_tokens: int
) -> dict[str, Any]:
    """Lengths, acceptance by position and looping share of the answers of one set."""
    by_answer = [whole_steps(done, depth, max_new_tokens) for done in answers]
    looping = [is_looping(done.token_ids) for done in answers]

    def length(steps: Sequence[Step]) -> float | None:
        return float(np.mean([step.committed for step in steps])) if steps else None

    every = [step for steps in by_answer for step in steps]
    accepted = np.array([step.accepted for step in every])
    proposed = np.array([step.proposed for step in every])
    position = np.arange(1, depth + 1)[:, None]
    reached = ((accepted >= position - 1) & (proposed >= position)).sum(axis=1)
    passed = (accepted >= position).sum(axis=1)
    return {
        "accepted_length": length(every),
        "accepted_length_after_first": length([s for steps in by_answer for s in steps[1:]]),
        "accepted_length_not_looping": length(
            [s for steps, loops in zip(by_answer, looping, strict=True) if not loops for s in steps]
        ),
        "conditional_acceptance": (passed / np.maximum(reached, 1)).tolist(),
        "looping": float(np.mean(looping)),
        "steps": len(every),
        "tokens": sum(len(done.token_ids) for done in answers),
        "answers": [
            {"tokens": len(done.token_ids), "steps": len(done.commits), "looping": loops}
            for done, loops in zip(answers, looping, strict=True)
        ],
    }


def teacher_forced(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    answers: Sequence[Completion],
    temperature: float,
    length: int,
) -> dict[str, Any]:
    """``train.evaluate`` on these answers: 1 - TV, or greedy matches at temperature 0."""
    documents = [supervised_answer(done.prompt_ids, done.token_ids) for done in answers]
    dataset = TokenDataset(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate([document.loss_mask for document in documents]),
        np.cumsum([0, *(len(document.tokens) for document in documents)], dtype=np.int64),
        {"target": target.name, "temperature": temperature},
    )
    found = evaluate(drafter, target, dataset, temperature=temperature, length=length)
    return dataclasses.asdict(found)


def main(
    prompts: Path,
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]],
    *,
    target: str = "smollm2-135m",
    max_new_tokens: int = 256,
    batch: int = 256,
    limit_per_set: int | None = None,
    dtype: Dtype = "bfloat16",
    seed: int = 980406,
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Measure drafters in static mode with full blocks, at temperatures 0 and 1.

    Args:
        prompts: folder of prompt sets; their held-out part is answered.
        drafter: folder or name; give it again for another one. The accepted drafts of the first
            two are compared.
        target: name, folder, GGUF file or hub id.
        max_new_tokens: tokens of an answer at most.
        batch: requests decoded together.
        limit_per_set: prompts of each set at most.
        dtype: of weights and caches.
        seed: of the first prompt at temperature 1; later prompts count up.
        output: where to write the raw result.

    Returns:
        0, or 1 if an arm failed.
    """
    loaded = load_target(target, jnp.dtype(dtype))
    sets = held_out.load(prompts, limit_per_set)
    encoded = {name: held_out.encode(loaded, turns) for name, turns in sets.items()}
    flat = [(name, ids) for name, prompt_ids in encoded.items() for ids in prompt_ids]
    context = held_out.context_for([ids for _, ids in flat], max_new_tokens)
    record = Record(
        output,
        target=target,
        drafters=drafter,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        batch=batch,
        seed=seed,
        context=context,
        prompts={name: len(turns) for name, turns in sets.items()},
    )
    for name, temperature in itertools.product(drafter, TEMPERATURES):
        by_set: dict[str, list[Completion]] = {}
        with record.arm(drafter=name, temperature=temperature, figure="generated") as entry:
            pair = open_drafter(name, loaded)
            depth = pair.config.block_size
            session = Generator(
                loaded, pair, mode="static", batch=min(batch, len(flat)), max_context=context
            )
            requests = [
                Request(
                    ids,
                    SamplingParams(
                        temperature=temperature,
                        seed=(seed + index) % 2**32,
                        max_new_tokens=max_new_tokens,
                    ),
                )
                for index, (_, ids) in enumerate(flat)
            ]
            begin = time.perf_counter()
            session.warmup(requests[0].params)
            entry["compile_seconds"] = round(time.perf_counter() - begin, 3)
            begin = time.perf_counter()
            answers = session.generate(requests)
            entry["generate_seconds"] = round(time.perf_counter() - begin, 3)
            entry["tokens"] = require_tokens(answers)
            for (owner, _), done in zip(flat, answers, strict=True):
                by_set.setdefault(owner, []).append(done)
            entry["sets"] = {
                owner: generated_figures(own, depth, max_new_tokens)
                for owner, own in by_set.items()
            }
            entry["macro"] = macro(entry["sets"])
        with record.arm(drafter=name, temperature=temperature, figure="teacher-forced") as entry:
            if not by_set:
                raise RuntimeError("there are no answers to measure on")
            pair = open_drafter(name, loaded)
            entry["sets"] = {
                owner: teacher_forced(loaded, pair, own, temperature, context)
                for owner, own in by_set.items()
            }
            entry["macro"] = macro(entry["sets"])
    record.facts["accepted_drafts_ratio"] = ratios(record.arms, drafter)
    _print(record, list(sets))
    return record.finish()


def macro(sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over the sets, each set weighing the same; None where a set has no figure."""
    found = {}
    for name in MACRO:
        values = [figures[name] for figures in sets.values() if name in figures]
        if values:
            found[name] = None if None in values else np.mean(values, axis=0).tolist()
    return found


def ratios(arms: Sequence[dict[str, Any]], drafters: Sequence[str]) -> list[dict[str, Any]]:
    """Accepted drafts (length - 1) of the first drafter over those of the second."""
    found = {
        (arm["figure"], arm["temperature"], arm["drafter"]): arm for arm in arms if "macro" in arm
    }
    rows = []
    for figure, temperature in itertools.product(LENGTH, TEMPERATURES):
        pair = [found.get((figure, temperature, name)) for name in drafters[:2]]
        if len(pair) == 2 and pair[0] and pair[1]:
            mine, other = ({**arm["sets"], "macro": arm["macro"]} for arm in pair if arm)
            length = LENGTH[figure]
            row = {name: _ratio(mine[name][length], other[name][length]) for name in mine}
            rows.append({"figure": figure, "temperature": temperature, "sets": row})
    return rows


def _ratio(mine: float | None, other: float | None) -> float | None:
    return None if mine is None or other is None or other <= 1 else (mine - 1) / (other - 1)


def _print(record: Record, sets: Sequence[str]) -> None:
    columns = ("drafter", "T", "figure", *sets, "macro", "conditional acceptance")
    table = Table(*columns, box=None)
    names = [*sets, "macro"]
    for arm in record.arms:
        head = (Path(arm["drafter"]).name, f"{arm['temperature']:g}")
        if "macro" not in arm:
            table.add_row(*head, f"{arm['figure']} failed")
            continue
        figures = {**arm["sets"], "macro": arm["macro"]}
        by_position = " ".join(f"{value:.2f}" for value in arm["macro"]["conditional_acceptance"])
        length = LENGTH[arm["figure"]]
        table.add_row(
            *head,
            f"length, {arm['figure']}",
            *(_number(figures[name][length]) for name in names),
            by_position,
        )
        for extra in ("accepted_length_not_looping", "looping"):
            if extra in arm["macro"]:
                label = extra.replace("accepted_length_", "length, ").replace("_", " ")
                table.add_row(*head, label, *(_number(figures[name][extra]) for name in names))
    for row in record.facts["accepted_drafts_ratio"]:
        numbers = (_number(row["sets"][name]) for name in names)
        table.add_row(
            "first/second", f"{row['temperature']:g}", f"drafts, {row['figure']}", *numbers
        )
    Console(width=180).print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
