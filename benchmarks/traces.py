"""Traces of acceptance: a full block drafted and verified at every position of answers.

    python -m benchmarks.traces --prompts PROMPTS --temperatures 0 1 --out TRACES

writes ``traces-T0.jsonl`` and ``traces-T1.jsonl`` (``calibration.records``). The answers are those
of plain decoding, one token a step; at every step a whole block is drafted and judged besides, and
nothing of it is committed. So a trace knows how a block fares wherever it begins, not only where
full blocks happened to end, and ``benchmarks.replayed_pair`` can replay windows of any length: at
temperature 0 exactly, above it by one draw a position.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int

from benchmarks import held_out
from benchmarks.pair import open_drafter
from dspark_jax.calibration.records import (
    AnswerRecord,
    Records,
    Source,
    prompt_key,
    read_records,
    stack_blocks,
    write_records,
)
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import SMOLLM2, LoadedTarget, load_target
from dspark_jax.decode.confidences import weights_digest
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.loop import generate
from dspark_jax.decode.state import Requests, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.schedule.cost import no_costs
from dspark_jax.text.template_digest import template_digest

MODE = "every-position"
"""Stands as the mode in a trace's first line."""


@dataclasses.dataclass(frozen=True, eq=False)
class Traces:
    """N blocks at consecutive positions, one answer after the other.

    Attributes:
        source: the pair that was recorded.
        answers: how many there are.
        logits: uncalibrated confidence logits.
        accepted: drafts accepted.
    """

    source: Source
    answers: int
    logits: Float[np.ndarray, "N G"]
    accepted: Int[np.ndarray, "N"]

    @property
    def acceptance(self) -> Float[np.ndarray, "G"]:
        """Share of blocks of which at least 1, 2, ... drafts are accepted."""
        positions = np.arange(1, self.logits.shape[1] + 1)
        return (self.accepted[:, None] >= positions).mean(axis=0)


def read_traces(path: Path) -> Traces:
    """Read a file of traces.

    Raises:
        ValueError: no such file of records, or one that was not recorded at every position.
    """
    records = read_records(path)
    if records.source.mode != MODE:
        raise ValueError(
            f"{path} was recorded in mode {records.source.mode!r}; wanted {MODE!r}: record it with "
            "benchmarks.traces"
        )
    blocks = stack_blocks(records.answers, records.source.block_size)
    if len(blocks) < 2 or not blocks.labelled.all():
        raise ValueError(
            f"{path} holds {len(blocks)} blocks, {int(blocks.labelled.all(axis=1).sum())} of them "
            "judged in full; wanted 2 or more, all of them in full"
        )
    logits = blocks.logits.astype(np.float32)
    return Traces(records.source, len(records.answers), logits, blocks.accepted)


def groups(
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    new_tokens: int,
    batch: int,
) -> Iterator[tuple[Sequence[Sequence[int]], Array, Array, Requests]]:
    """Prompts by groups of at most ``batch``, as `decode.loop.generate` takes them.

    Yields:
        The group, its ids ``[S, P]``, their lengths ``[S]``, and its requests, seeded by place.
    """
    width = -(-max(map(len, prompts)) // 64) * 64
    batch = min(batch, len(prompts))
    for begin in range(0, len(prompts), batch):
        asked = prompts[begin : begin + batch]
        ids, lengths = np.zeros((batch, width), np.int32), np.ones(batch, np.int32)
        for row, prompt in enumerate(asked):
            ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        requests = make_requests(
            batch,
            temperature=temperature,
            seed=begin,
            # rows of a group that is not full end at once
            max_new_tokens=jnp.where(jnp.arange(batch) < len(asked), new_tokens, 0),
            context=width + new_tokens,
            stop_ids=jnp.asarray(target.stop_token_ids or (-1,)),
        )
        yield asked, jnp.asarray(ids), jnp.asarray(lengths), requests


def record(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    new_tokens: int,
    batch: int,
) -> Records:
    """Answer prompts, and draft and judge a full block at every position of each answer.

    A block that would run past the answer's end is left out.

    Args:
        prompts: token ids.
        temperature: 0 is greedy.
        new_tokens: tokens of an answer at most.
        batch: prompts answered together.
    """
    size = drafter.config.block_size
    config = StepConfig(
        target.config,
        drafter.config,
        "cap-accept",
        # no confidence is above it: nothing is committed but the target's own token
        threshold=1.0,
        sampled=temperature > 0,
        filtered=False,
        record_confidences=True,
    )
    answers = []
    how = {"temperature": temperature, "new_tokens": new_tokens, "batch": batch}
    for asked, ids, lengths, requests in groups(target, prompts, **how):
        found = generate(
            Weights(target.weights, drafter.weights),
            ids,
            lengths,
            requests,
            no_costs(len(lengths), size),
            config=config,
            max_tokens=new_tokens,
        )
        assert found.confidence_log is not None, "the config asks for it"
        logits = np.asarray(found.confidence_log).round(4)
        accepted, counts = np.asarray(found.accepted), np.asarray(found.count)
        for row, prompt in enumerate(asked):
            whole = max(int(counts[row]) - size, 0)
            answers.append(
                AnswerRecord(
                    prompt=prompt_key(prompt),
                    logits=tuple(map(tuple, logits[row, :whole].tolist())),
                    accepted=tuple(accepted[row, :whole].tolist()),
                    verified=(size,) * whole,
                )
            )
    source = Source(
        target=target.name,
        drafter=drafter.name,
        drafter_sha256=weights_digest(drafter.weights),
        block_size=size,
        drafted=size,
        mode=MODE,
        temperature=float(temperature),
        top_k=0,
        top_p=1.0,
        template_sha256=None if target.text is None else template_digest(target.text, None),
        calibration=None,
    )
    return Records(source, tuple(answers))


def main(
    prompts: Path,
    *,
    out: Path,
    target: str = SMOLLM2,
    drafter: str = "smollm2-135m-dspark",
    temperatures: tuple[float, ...] = (0.0, 1.0),
    new_tokens: int = 160,
    batch: int = 512,
    limit: int | None = None,
    most_prompt_tokens: int = 512,
) -> int:
    """Record traces on the held-out prompts.

    Args:
        prompts: the prompt folder.
        out: folder for traces-T0.jsonl and so on.
        target: a target as `dspark generate` takes it.
        drafter: a drafter with a confidence head.
        temperatures: a file each.
        new_tokens: tokens of an answer at most.
        batch: prompts answered together.
        limit: prompts at most, from each set in turn.
        most_prompt_tokens: longer prompts are left out.
    """
    loaded = load_target(target, jnp.bfloat16)
    pair = open_drafter(drafter, loaded)
    asked = held_out.encode(loaded, held_out.interleave(held_out.load(prompts), limit))
    asked = [ids for ids in asked if len(ids) <= most_prompt_tokens]
    out.mkdir(parents=True, exist_ok=True)
    for temperature in temperatures:
        path = out / f"traces-T{temperature:g}.jsonl"
        options = {"temperature": temperature, "new_tokens": new_tokens, "batch": batch}
        write_records(path, record(loaded, pair, asked, **options))
        found = read_traces(path)
        shares = " ".join(f"{share:.2f}" for share in found.acceptance)
        print(f"{path}: {found.answers} answers, {len(found.accepted)} blocks; accepted: {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
