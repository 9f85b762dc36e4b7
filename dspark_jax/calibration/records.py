"""Record files: what real verification said about confidences, and where it was asked.

JSON Lines. The first line tells where the records come from (``Source``), every further line is
one answer::

    {"prompt": "9f2c...", "logits": [[2.1, 0.3], [1.7, -0.2]], "accepted": [2, 0],
     "verified": [2, 2]}

with one entry a decoding step: the uncalibrated confidence logits of its drafts, how many were
accepted, and how many have a label. ``prompt`` is a digest of the prompt, so that all samples of
one prompt stay on one side when records are split.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration.blocks import VerifiedBlocks

FORMAT = "dspark-confidence-records"


@dataclasses.dataclass(frozen=True)
class Source:
    """What records were made with; a fit takes records of one source only.

    Attributes:
        target: name or path of the target.
        drafter: name of the drafter.
        drafter_sha256: digest of the drafter's weights.
        block_size: the drafter's block size.
        drafted: drafts in a block, less than ``block_size`` under a fixed k.
        mode: decoding mode; only "static" verifies every draft.
        temperature: sampling temperature, 0 = greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        template_sha256: digest of the chat template's rendering; None for raw prompts.
        calibration: STS temperatures that were applied, None for none.
    """

    target: str
    drafter: str
    drafter_sha256: str
    block_size: int
    drafted: int
    mode: str
    temperature: float
    top_k: int
    top_p: float
    template_sha256: str | None
    calibration: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class AnswerRecord:
    """The steps of one answer.

    Attributes:
        prompt: digest of the prompt.
        logits: one row of G uncalibrated confidence logits a step.
        accepted: drafts accepted at each step, of those with a label.
        verified: drafts with a label at each step.
    """

    prompt: str
    logits: tuple[tuple[float, ...], ...]
    accepted: tuple[int, ...]
    verified: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Records:
    """Answers of one source."""

    source: Source
    answers: tuple[AnswerRecord, ...]


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """Digest of a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, np.int64).tobytes()).hexdigest()[:16]


def write_records(path: Path, records: Records) -> None:
    """Write the file that ``read_records`` reads, at once: a crash leaves none or all of it."""
    lines = [{"format": FORMAT, **dataclasses.asdict(records.source)}]
    lines += [dataclasses.asdict(answer) for answer in records.answers]
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    partial.replace(path)


def read_records(path: Path) -> Records:
    """Read a record file.

    Raises:
        ValueError: no record file, or a line that is no answer of it; the line is named.
        FileNotFoundError: no such file.
    """
    lines = path.read_text().splitlines()
    try:
        first = json.loads(lines[0]) if lines else None
        if not isinstance(first, dict) or first.pop("format", None) != FORMAT:
            raise ValueError(f'its first line must hold "format": "{FORMAT}"')
        source = Source(**{**first, "calibration": _tuple(first.get("calibration"))})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of confidence records: {error}") from error
    answers = []
    for number, line in enumerate(lines[1:], 2):
        try:
            answers.append(_answer(json.loads(line), source.drafted))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is no answer: {error!r}") from error
    return Records(source, tuple(answers))


def _tuple(values: Any) -> Any:
    return tuple(values) if isinstance(values, list) else values


def _answer(entry: dict[str, Any], drafted: int) -> AnswerRecord:
    logits = tuple(tuple(map(float, row)) for row in entry["logits"])
    accepted, verified = tuple(map(int, entry["accepted"])), tuple(map(int, entry["verified"]))
    if not len(logits) == len(accepted) == len(verified):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(accepted)} accepted, {len(verified)} verified"
        )
    widths = {len(row) for row in logits} - {drafted}
    if widths:
        raise ValueError(f"a row has {widths.pop()} logits, blocks have {drafted} drafts")
    return AnswerRecord(str(entry["prompt"]), logits, accepted, verified)


def check_fittable(source: Source, where: str) -> None:
    """Refuse records that say too little, or that a calibration has touched.

    Raises:
        ValueError: a mode that trims, blocks cut by a fixed k, or logits already calibrated.
    """
    problems = (
        ("mode", source.mode, "static", "other modes verify only what the budget allows"),
        ("drafted", source.drafted, source.block_size, "a fixed k cuts blocks short"),
        ("calibration", source.calibration, None, "STS is fitted on uncalibrated logits"),
    )
    for name, found, wanted, reason in problems:
        if found != wanted:
            raise ValueError(
                f"{where}: {name} is {found!r}, a fit wants {wanted!r} ({reason}): record again"
            )


def check_same_source(found: Source, wanted: Source, where: str) -> None:
    """Refuse records made with something else.

    Raises:
        ValueError: a field differs; names it, the value found and the value wanted.
    """
    for field in dataclasses.fields(Source):
        here, there = getattr(found, field.name), getattr(wanted, field.name)
        if here != there:
            raise ValueError(f"{where}: {field.name} is {here!r}, wanted {there!r}")


def without_repeats(answers: Iterable[AnswerRecord]) -> tuple[AnswerRecord, ...]:
    """Answers in order, each but once: greedy samples of one prompt are the same answer."""
    return tuple(dict.fromkeys(answers))


def split_by_prompt(
    answers: Sequence[AnswerRecord], *, test_fraction: float, seed: int
) -> tuple[tuple[AnswerRecord, ...], tuple[AnswerRecord, ...]]:
    """Answers to fit on and answers to test on; no prompt is on both sides.

    Raises:
        ValueError: a fraction outside (0, 1), or fewer than two prompts.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; wanted above 0, below 1")
    prompts = {answer.prompt for answer in answers}
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts cannot be split into fit and test; wanted 2")
    shuffled = sorted(prompts, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())
    held = set(shuffled[: min(max(round(test_fraction * len(prompts)), 1), len(prompts) - 1)])
    fit = tuple(answer for answer in answers if answer.prompt not in held)
    return fit, tuple(answer for answer in answers if answer.prompt in held)


def stack_blocks(answers: Sequence[AnswerRecord], block_size: int) -> VerifiedBlocks:
    """All steps of all answers as arrays."""
    return VerifiedBlocks(
        logits=np.array([row for answer in answers for row in answer.logits], np.float64).reshape(
            -1, block_size
        ),
        accepted=np.array([n for answer in answers for n in answer.accepted], np.int64),
        verified=np.array([n for answer in answers for n in answer.verified], np.int64),
    )
