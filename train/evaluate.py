"""The evaluation job: what a drafter is worth to its target, set by set, with figures drawn."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.calibration.file import Calibration, load_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.template_digest import template_digest
from train.data import TokenDataset, supervised_answer
from train.evaluate_config import EvaluateConfig, SetSection
from train.evaluate_figures import draw_figures
from train.evaluate_table import print_report
from train.generated import generated_figures, verified_blocks
from train.journal import Journal, Key, answer_all
from train.progress import progress_bar
from train.run_folder import open_run, versions
from train.scalars import write_scalars
from train.shards import digest, read_dataset, write_whole
from train.stopping import Stop
from train.teacher_forced import BATCH, check_supported, teacher_forced

REPORT = "evaluation.json"
ANSWERS = "answers.jsonl"
CONTEXT_STEP = 64


def run_evaluation(
    config: EvaluateConfig,
    target: LoadedTarget,
    drafter: LoadedDrafter,
    *,
    resume: bool = False,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Answer the prompt sets in mode "static" at every temperature and measure the drafts.

    The folder ``config.evaluation.output`` receives the run's record, the answers as they end,
    ``evaluation.json``, figures as PNG, and TensorBoard's file.

    Args:
        resume: continue the folder of an earlier attempt; its answers are not made again.
        stop: entered by the caller; a signal then ends the job between two pieces of work.

    Returns:
        What ``evaluation.json`` holds.

    Raises:
        ValueError: prompts, data folders, a calibration or a pair that do not fit together; a
            resumed run of another config.
        FileExistsError: a run without ``resume``; FileNotFoundError: none with it.
        Stopped: a signal came.
    """
    settings = config.evaluation
    if settings.teacher_forced:
        check_supported(target, drafter)
    calibration = None
    if settings.calibration is not None:
        calibration = load_calibration(settings.calibration, block_size=drafter.config.block_size)
    sets = {one.name: load_set(one, target, settings.thinking) for one in config.sets}
    conditions = _conditions(config, target, sets)
    folder = Path(settings.output)
    job = _Job(config, target, drafter, calibration, sets, stop or Stop())
    open_run(folder, config, conditions, resume)
    journal = Journal(folder / ANSWERS)
    try:
        arms = [
            job.arm(number, temperature, journal)
            for number, temperature in enumerate(settings.temperatures)
        ]
    finally:
        journal.close()
    report = {
        "drafter": drafter.name,
        "block_size": drafter.config.block_size,
        "conditions": conditions,
        "seed": settings.seed,
        "calibration": settings.calibration,
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "arms": [arm for arm, _ in arms],
    }
    write_whole(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())
    for number, (arm, _) in enumerate(arms):
        write_scalars(folder, number, _scalars(arm))
    draw_figures(report, [blocks for _, blocks in arms], folder)
    print_report(report)
    return report


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Prompts to answer as token ids, or documents to measure: one of the two.

    ``identity`` is what makes two sets of one name the same set.
    """

    prompts: list[list[int]] | None
    documents: TokenDataset | None
    identity: dict[str, Any]


def load_set(section: SetSection, target: LoadedTarget, thinking: bool | None) -> EvaluationSet:
    """Read one set.

    Raises:
        ValueError: prompts that the target has no tokenizer or template for, an empty selection,
            documents of another target or thinking mode.
    """
    if section.folder is not None:
        documents = read_dataset(Path(section.folder))
        manifest = documents.manifest
        for name, found, wanted in (
            ("target", manifest["target"], target.name),
            ("thinking", manifest.get("thinking"), thinking),
        ):
            if found != wanted:
                raise ValueError(
                    f"set {section.name!r}: {section.folder} was written with {name} = {found!r}, "
                    f"the evaluation has {wanted!r}"
                )
        identity = {
            "language": section.language,
            "template_sha256": manifest["template_sha256"],
            "temperature": manifest["temperature"],
            **documents.fingerprint,
        }
        return EvaluationSet(None, documents, identity)
    assert section.file is not None
    lines = read_prompts(Path(section.file))
    lines = lines[-(section.last or 0) :][: section.limit]
    text = target.text
    if text is None:
        raise ValueError(f"target {target.name} has no tokenizer to read set {section.name!r} with")
    prompts = [
        text.encode(line["prompt"])
        if "prompt" in line
        else text.chat_ids([{"role": "user", "content": line["turns"][0]}], thinking)
        for line in lines
    ]
    identity = {
        "language": section.language,
        "prompts": len(prompts),
        "prompts_sha256": digest(
            json.dumps([line.get("turns", [line.get("prompt")])[0] for line in lines])
        ),
    }
    return EvaluationSet(prompts, None, identity)


def _conditions(
    config: EvaluateConfig, target: LoadedTarget, sets: Mapping[str, EvaluationSet]
) -> dict[str, Any]:
    """What two runs must share to be compared."""
    settings, text = config.evaluation, target.text
    template = None
    if text is not None and text.has_template:
        template = template_digest(text, settings.thinking)
    return {
        "target": target.name,
        "dtype": config.target.dtype,
        "template_sha256": template,
        "thinking": settings.thinking,
        "temperatures": list(settings.temperatures),
        "max_new_tokens": settings.max_new_tokens,
        "sets": {name: one.identity for name, one in sets.items()},
    }


class _Job:
    """One drafter on all sets."""

    def __init__(
        self,
        config: EvaluateConfig,
        target: LoadedTarget,
        drafter: LoadedDrafter,
        calibration: Calibration | None,
        sets: Mapping[str, EvaluationSet],
        stop: Stop,
    ) -> None:
        self._config = config
        self._target, self._drafter = target, drafter
        self._calibration = calibration
        self._sets = sets
        self._stop = stop
        prompts = [ids for one in sets.values() for ids in one.prompts or ()]
        self._session = None
        if prompts:
            longest = max(map(len, prompts)) + config.evaluation.max_new_tokens + 1
            self._session = Generator(
                target,
                drafter,
                mode="static",
                batch=min(config.evaluation.batch, len(prompts)),
                max_context=_steps_of(longest),
                record_confidences=drafter.config.enable_confidence_head,
            )

    def arm(self, number: int, temperature: float, journal: Journal) -> tuple[dict[str, Any], Any]:
        """All figures at one temperature, and the blocks behind them (None without confidences)."""
        scale = None
        if self._calibration is not None:
            told = self._calibration.distant(temperature)
            if told is not None:
                print(told)
            scale = self._calibration.nearest(temperature).temperatures
        answers = self._answers(number, temperature, journal)
        depth, limit = self._drafter.config.block_size, self._config.evaluation.max_new_tokens
        figures: dict[str, dict[str, Any]] = {name: {} for name in self._sets}
        for name, own in answers.items():
            figures[name]["generated"] = generated_figures(own, depth, limit, scale)
        if self._config.evaluation.teacher_forced:
            for name, quality in self._teacher_forced(temperature, answers).items():
                figures[name]["teacher_forced"] = quality
        arm: dict[str, Any] = {
            "temperature": temperature,
            "sts_temperatures": scale,
            "sets": figures,
            "macro": macro(figures),
        }
        every = [done for own in answers.values() for done in own]
        blocks = None
        if every and self._drafter.config.enable_confidence_head:
            blocks = verified_blocks(every, depth)
            pooled = generated_figures(every, depth, limit, scale)
            arm["all_sets"] = {
                name: pooled[name]
                for name in ("thresholds", "thresholds_calibrated", "calibration")
                if name in pooled
            }
        return arm, blocks

    def _answers(
        self, number: int, temperature: float, journal: Journal
    ) -> dict[str, list[Completion]]:
        """Answers of every prompt set, from the journal or new."""
        settings = self._config.evaluation
        owners: dict[Key, str] = {}
        requests: dict[Key, Request] = {}
        for place, (name, one) in enumerate(self._sets.items()):
            for index, prompt_ids in enumerate(one.prompts or ()):
                key = (number, place, index)
                params = SamplingParams(
                    temperature=temperature,
                    seed=(settings.seed + len(requests)) % 2**32,
                    max_new_tokens=settings.max_new_tokens,
                )
                owners[key], requests[key] = name, Request(prompt_ids, params)
        if self._session is None:
            return {}
        known = sum(key in journal.kept for key in requests)
        if known < len(requests):
            self._session.warmup(SamplingParams(temperature=temperature))
        with progress_bar(f"answers, T = {temperature:g}", len(requests), known) as advance:
            found = answer_all(self._session, requests, journal, self._stop, lambda *_: advance(1))
        by_set: dict[str, list[Completion]] = {}
        for key, done in found.items():
            by_set.setdefault(owners[key], []).append(done)
        return by_set

    def _teacher_forced(
        self, temperature: float, answers: Mapping[str, Sequence[Completion]]
    ) -> dict[str, dict[str, Any]]:
        """``teacher_forced`` on every set's documents: those given, or its answers."""
        datasets = {}
        for name, one in self._sets.items():
            datasets[name] = one.documents or TokenDataset.of(
                [supervised_answer(done.prompt_ids, done.token_ids) for done in answers[name]],
                {"target": self._target.name, "temperature": temperature},
            )
        batches = sum(math.ceil(len(data) / BATCH) for data in datasets.values())
        # One length for all sets: one program.
        length = _steps_of(max(int(np.diff(data.offsets).max()) for data in datasets.values()))
        num_anchors = min(self._config.evaluation.num_anchors, length - 1)
        found = {}
        with progress_bar(f"teacher-forced, T = {temperature:g}", batches) as advance:

            def between() -> None:
                advance(1)
                self._stop.check()

            for name, data in datasets.items():
                quality = teacher_forced(
                    self._drafter,
                    self._target,
                    data,
                    temperature=temperature,
                    length=length,
                    num_anchors=num_anchors,
                    between=between,
                )
                found[name] = dataclasses.asdict(quality)
        return found


def _steps_of(length: int) -> int:
    """``length`` rounded up: contexts of few sizes compile few programs."""
    return -(-length // CONTEXT_STEP) * CONTEXT_STEP


GENERATED = (
    "accepted_length",
    "accepted_length_after_first",
    "accepted_length_not_looping",
    "looping",
    "conditional_acceptance",
)
TEACHER_FORCED = ("expected_length", "conditional_acceptance")


def macro(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over the sets, each weighing the same; None where a set has no figure."""
    found: dict[str, dict[str, Any]] = {}
    for kind, names in (("generated", GENERATED), ("teacher_forced", TEACHER_FORCED)):
        own = [figures[kind] for figures in sets.values() if kind in figures]
        if own:
            found[kind] = {name: _mean([figures[name] for figures in own]) for name in names}
    return found


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Sequence):
        return [_mean(column) for column in zip(*values, strict=True)]
    return None if None in values else float(np.mean(values))


def _scalars(arm: Mapping[str, Any]) -> dict[str, float]:
    """What TensorBoard shows of an arm; its step is the arm's number."""
    found = {"temperature": float(arm["temperature"])}
    for name, figures in {**arm["sets"], "macro": arm["macro"]}.items():
        for kind, figure in (
            ("generated", "accepted_length"),
            ("teacher_forced", "expected_length"),
        ):
            value = figures.get(kind, {}).get(figure)
            if value is not None:
                found[f"{figure}/{name}"] = value
    for row in arm.get("all_sets", {}).get("calibration", ()):
        for name in ("ece_before", "ece_after"):
            if row[name] is not None:
                found[f"{name}/{row['position']}"] = row[name]
    return found
