"""Greedy identity: every mode and policy against plain decoding, token for token.

The reference is mode "off" at batch 1. Mode "off" at the larger batch is the control: it shows
how often batching alone makes answers part. Any answer that parts is judged by ``parting``.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import held_out
from benchmarks.pair import open_drafter
from benchmarks.parting import compare
from benchmarks.record import Record, require_tokens
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.schedule.cost import CostTables, no_costs
from train.config import Dtype

DRAFTED: dict[str, dict[str, Any]] = {
    "static": {"mode": "static"},
    "static k=3": {"mode": "static", "k": 3},
    "compact lagged": {"mode": "compact", "policy": "lagged"},
    "compact causal": {"mode": "compact", "policy": "causal"},
    "compact fresh": {"mode": "compact", "policy": "fresh"},
    "cap-accept": {"mode": "cap-accept"},
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding at one batch size."""

    name: str
    batch: int
    settings: dict[str, Any]

    @property
    def adaptive(self) -> bool:
        """Whether it trims windows."""
        return self.settings["mode"] in ("compact", "cap-accept")

    def open(self, target: LoadedTarget, drafter: LoadedDrafter, context: int) -> Generator:
        """A session with few shapes, so that it compiles soon."""
        extra: dict[str, Any] = {}
        if self.adaptive:
            depth = drafter.config.block_size
            full = self.batch * (depth + 1)
            extra["cost_table"] = trimming_costs(self.batch, depth)
            extra["walk_caps"] = tuple(sorted({min(2, depth), depth}))
            if self.settings["mode"] == "compact":
                extra["buckets"] = tuple(sorted({max(self.batch, full // 2), full}))
        return Generator(
            target, drafter, batch=self.batch, max_context=context, **self.settings, **extra
        )


def trimming_costs(slots: int, block_size: int) -> CostTables:
    """Invented costs under which a draft of survival below about 0.2 does not pay.

    A row costs 1, a step ``6 * slots`` more, drafting ``slots / 2``.
    """
    rows = jnp.arange(slots * (block_size + 1) + 1, dtype=jnp.float32)
    return dataclasses.replace(
        no_costs(slots, block_size),
        verify=(6.0 * slots + rows)[None],
        draft=jnp.full((1, slots + 1), slots / 2, jnp.float32),
        known=jnp.asarray(True),
    )


def trimmed_share(completions: Sequence[Completion], depth: int, max_new_tokens: int) -> float:
    """Share of steps that verified fewer drafts than the block and the length limit allow."""
    trimmed = steps = 0
    for done in completions:
        emitted = 0
        for window, count in zip(done.windows, done.commits, strict=True):
            trimmed += window < min(depth, max_new_tokens - emitted - 1)
            emitted += count
        steps += len(done.windows)
    return trimmed / steps


def main(
    prompts: Path,
    drafter: str,
    *,
    target: str = "smollm2-135m",
    count: int = 100,
    max_new_tokens: int = 96,
    dtype: Dtype = "float32",
    batches: tuple[int, int] = (1, 16),
    arms: tuple[str, ...] = tuple(DRAFTED),
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Compare every mode and policy with plain decoding at temperature 0.

    Args:
        prompts: folder of prompt sets; their held-out part is answered.
        drafter: folder or name of a drafter with a confidence head.
        target: name, folder, GGUF file or hub id.
        count: prompts.
        max_new_tokens: tokens of an answer at most.
        dtype: of weights and caches.
        batches: the reference's batch size, and the larger one.
        arms: what to compare.
        output: where to write the raw result.

    Returns:
        0, or 1 after any bug or failed arm.
    """
    if unknown := set(arms) - set(DRAFTED):
        raise ValueError(f"no arms {sorted(unknown)}; known: {', '.join(DRAFTED)}")
    if dtype == "float32":
        # the whole process: a context manager would not reach the threads that compile
        jax.config.update("jax_default_matmul_precision", "highest")
    loaded = load_target(target, jnp.dtype(dtype))
    pair = open_drafter(drafter, loaded)
    turns = held_out.interleave(held_out.load(prompts), count)
    encoded = held_out.encode(loaded, turns)
    context = held_out.context_for(encoded, max_new_tokens)
    requests = [Request(ids, SamplingParams(max_new_tokens=max_new_tokens)) for ids in encoded]
    record = Record(
        output,
        target=target,
        drafter=drafter,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        context=context,
        prompt_lengths=[len(ids) for ids in encoded],
    )
    small, large = batches
    wanted = [Arm("off", batch, {"mode": "off"}) for batch in (small, large)]
    wanted += [Arm(name, batch, DRAFTED[name]) for batch in (small, large) for name in arms]
    reference: list[Completion] = []
    # XLA compiles outside the interpreter lock; programs are many and machines have cores
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        compiled = [pool.submit(_compile, arm, loaded, pair, context) for arm in wanted]
        sessions = [(future.exception(), future) for future in compiled]
    for arm, (error, future) in zip(wanted, sessions, strict=True):
        with record.arm(name=arm.name, batch=arm.batch) as entry:
            if error is not None:
                raise error
            session, entry["compile_seconds"] = future.result()
            begin = time.perf_counter()
            answers = session.generate(requests)
            entry["generate_seconds"] = round(time.perf_counter() - begin, 3)
            entry["tokens"] = require_tokens(answers)
            entry["steps"] = sum(len(done.commits) for done in answers)
            entry["accepted_length"] = entry["tokens"] / entry["steps"]
            if arm is wanted[0]:
                reference = answers
                entry["token_ids"] = [done.token_ids for done in answers]
            if not reference:
                raise RuntimeError("the reference arm failed, so there is nothing to compare with")
            partings = [
                compare(
                    loaded,
                    ids,
                    mine.token_ids,
                    other.token_ids,
                    batch=large,
                    width=pair.config.block_size + 1,
                    capacity=context,
                )
                for ids, mine, other in zip(encoded, reference, answers, strict=True)
            ]
            entry["verdicts"] = dict(collections.Counter(found.verdict for found in partings))
            entry["parted"] = [
                {"prompt": index, **dataclasses.asdict(found)}
                for index, found in enumerate(partings)
                if found.verdict != "EXACT"
            ]
            entry["answers_parted"] = {
                index: answers[index].token_ids
                for index, found in enumerate(partings)
                if found.verdict != "EXACT"
            }
            if arm.adaptive:
                share = trimmed_share(answers, pair.config.block_size, max_new_tokens)
                entry["trimmed_share"] = share
                if not share:
                    raise RuntimeError("no window was trimmed: the arm proves nothing")
            if "BUG" in entry["verdicts"]:
                raise AssertionError(f"{entry['verdicts']['BUG']} answers differ beyond rounding")
    _print(record)
    return record.finish()


def _compile(
    arm: Arm, target: LoadedTarget, drafter: LoadedDrafter, context: int
) -> tuple[Generator, float]:
    begin = time.perf_counter()
    session = arm.open(target, drafter, context)
    session.warmup()
    return session, round(time.perf_counter() - begin, 3)


def _print(record: Record) -> None:
    table = Table(
        "arm", "batch", "exact", "tie", "bug", "trimmed", "accepted", "seconds", "compile", box=None
    )
    for arm in record.arms:
        verdicts = arm.get("verdicts", {})
        cells = [str(verdicts.get(name, 0)) for name in ("EXACT", "TIE", "BUG")]
        share, length = arm.get("trimmed_share"), arm.get("accepted_length")
        table.add_row(
            arm["name"],
            str(arm["batch"]),
            *(cells if verdicts else ("failed", "", "")),
            "" if share is None else f"{share:.0%}",
            "" if length is None else f"{length:.2f}",
            f"{arm.get('generate_seconds', 0):.1f}",
            f"{arm.get('compile_seconds', 0):.1f}",
        )
    console = Console()
    console.print(table)
    for arm in record.arms:
        for found in arm.get("parted", []):
            gap, noise = found["gap"], found["noise"]
            reason = (
                "one answer ends there"
                if gap is None
                else f"gap {gap:.3g}, noise between batch shapes {noise:.3g}"
            )
            console.print(
                f"{found['verdict']} {arm['name']} batch {arm['batch']}: prompt {found['prompt']}, "
                f"token {found['position']}, {reason}"
            )


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
