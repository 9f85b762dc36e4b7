"""What verification said of generated answers: lengths, acceptance, thresholds, calibration.

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
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dspark_jax.calibration.blocks import VerifiedBlocks, sigmoid
from dspark_jax.calibration.quality import measure
from dspark_jax.calibration.records import stack_blocks
from dspark_jax.decode.confidences import answer_record
from dspark_jax.decode.request import Completion

LOOP_TOKENS = 48
LOOP_PERIOD = 16
THRESHOLDS = tuple(tenth / 10 for tenth in range(10))


@dataclasses.dataclass(frozen=True)
class Step:
    """One verification: drafts proposed and accepted, tokens committed, raw confidence logits."""

    proposed: int
    accepted: int
    committed: int
    logits: tuple[float, ...] | None = None


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last 48 tokens repeat with a period of at most 16."""
    tail = list(token_ids[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


def whole_steps(done: Completion, depth: int, max_new_tokens: int) -> list[Step]:
    """The steps of an answer that the length limit did not cut short, in order."""
    steps, emitted = [], 0
    logits = done.confidence_logits or (None,) * len(done.commits)
    for proposed, accepted, committed, own in zip(
        done.proposed, done.accepted, done.commits, logits, strict=True
    ):
        if max_new_tokens - emitted > depth:
            steps.append(Step(proposed, min(accepted, proposed), committed, own))
        emitted += committed
    return steps


def generated_figures(
    answers: Sequence[Completion],
    depth: int,
    max_new_tokens: int,
    temperatures: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Figures of the answers of one set; with confidences if the answers bring them.

    Args:
        answers: of a session in mode "static".
        depth: drafts in a block.
        max_new_tokens: the limit the answers were given.
        temperatures: STS temperatures by position, None without a calibration.
    """
    by_answer = [whole_steps(done, depth, max_new_tokens) for done in answers]
    looping = [is_looping(done.token_ids) for done in answers]

    def length(steps: Sequence[Step]) -> float | None:
        return float(np.mean([step.committed for step in steps])) if steps else None

    every = [step for steps in by_answer for step in steps]
    accepted = np.array([step.accepted for step in every], np.int64)
    proposed = np.array([step.proposed for step in every], np.int64)
    position = np.arange(1, depth + 1)[:, None]
    reached = ((accepted >= position - 1) & (proposed >= position)).sum(axis=1)
    passed = (accepted >= position).sum(axis=1)
    found: dict[str, Any] = {
        "accepted_length": length(every),
        "accepted_length_after_first": length([s for steps in by_answer for s in steps[1:]]),
        "accepted_length_not_looping": length(
            [s for steps, loops in zip(by_answer, looping, strict=True) if not loops for s in steps]
        ),
        "conditional_acceptance": [
            float(good / all_) if all_ else None for good, all_ in zip(passed, reached, strict=True)
        ],
        "reached": reached.tolist(),
        "looping": float(np.mean(looping)),
        "steps": len(every),
        "tokens": sum(len(done.token_ids) for done in answers),
        "answers": len(answers),
    }
    if every and every[0].logits is not None:
        blocks = verified_blocks(answers, depth)
        found["thresholds"] = threshold_figures(every)
        found["calibration"] = calibration_figures(blocks, temperatures)
        if temperatures is not None:
            found["thresholds_calibrated"] = threshold_figures(every, temperatures)
    return found


def verified_blocks(answers: Sequence[Completion], depth: int) -> VerifiedBlocks:
    """All blocks of these answers, for calibration figures."""
    records = [answer_record(done, done.prompt_ids) for done in answers]
    return stack_blocks(records, depth)


def threshold_figures(
    steps: Sequence[Step], temperatures: Sequence[float] | None = None
) -> list[dict[str, float | None]]:
    """What a static confidence threshold would have verified of the very same blocks.

    A block is cut before its first draft whose confidence is below the threshold (DeepSpec's
    rule). The blocks are those of a run that verified all of them: decoding under a threshold
    would visit other anchors.

    Returns:
        For each threshold: ``acceptance`` (accepted share of the drafts kept, None if none were),
        ``tokens_a_step`` and ``verified`` (drafts kept a step).
    """
    logits = np.array([step.logits for step in steps], np.float64)
    logits = np.where(np.isnan(logits), -np.inf, logits)
    scale = 1.0 if temperatures is None else np.asarray(temperatures, np.float64)
    confidence = sigmoid(logits / scale)
    accepted, proposed, committed = (
        np.array([getattr(step, name) for step in steps], np.int64)
        for name in ("accepted", "proposed", "committed")
    )
    return [_at_threshold(t, confidence, accepted, proposed, committed) for t in THRESHOLDS]


def _at_threshold(
    threshold: float,
    confidence: Float[np.ndarray, "N G"],
    accepted: Int[np.ndarray, "N"],
    proposed: Int[np.ndarray, "N"],
    committed: Int[np.ndarray, "N"],
) -> dict[str, float | None]:
    kept = np.minimum(np.cumprod(confidence >= threshold, axis=1).sum(axis=1), proposed)
    total = int(kept.sum())
    return {
        "threshold": threshold,
        "acceptance": float(np.minimum(accepted, kept).sum() / total) if total else None,
        # An accepted stop leaves no room for a bonus: then fewer tokens than kept + 1.
        "tokens_a_step": float(np.minimum(committed, kept + 1).mean()),
        "verified": float(kept.mean()),
    }


def calibration_figures(
    blocks: VerifiedBlocks, temperatures: Sequence[float] | None
) -> list[dict[str, Any]]:
    """ECE, AUROC and Brier by position; the values after STS are None without temperatures."""
    given = np.ones(blocks.block_size) if temperatures is None else np.asarray(temperatures)
    rows = [dataclasses.asdict(row) for row in measure(blocks, np.asarray(given, np.float64))]
    if temperatures is None:
        for row in rows:
            row["temperature"] = None
            row |= {name: None for name in row if name.endswith("_after")}
    return rows
