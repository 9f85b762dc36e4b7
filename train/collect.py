"""Confidence records from real verification: prompts answered in static mode, answer by answer."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from dspark_jax.calibration.records import Records, read_records, write_records
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.confidences import answer_record, record_source
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.template_digest import template_digest
from dspark_jax.text.text import Text
from train.answers import request_seed
from train.calibrate_config import CollectSection
from train.journal import Journal, Key, answer_all
from train.progress import progress_bar
from train.stopping import Stop

CHUNK_STEPS = 8
"""Steps between two looks at the answers: a signal waits for four times as many at most."""


class Collector:
    """Answers prompts with a pair and keeps what its verification said of the confidences.

    Raises:
        ValueError: a target without chat template, a drafter without confidence head, no prompt
            that fits; nothing has been decoded then.
    """

    def __init__(
        self, collect: CollectSection, target: LoadedTarget, drafter: LoadedDrafter
    ) -> None:
        text = target.text
        if text is None or not text.has_template:
            raise ValueError(f"target {target.name} has no chat template to ask prompts with")
        self._collect = collect
        found = _prompt_ids(collect, text)
        room = collect.max_context - collect.max_new_tokens
        self.prompts = tuple(ids for ids in found if len(ids) <= room)
        self.left_out = len(found) - len(self.prompts)
        if not self.prompts:
            raise ValueError(
                f"no prompt of {', '.join(collect.prompts)} leaves room for "
                f"{collect.max_new_tokens} tokens in a context of {collect.max_context}"
            )
        if len(self.prompts) < 2:
            raise ValueError(
                f"{', '.join(collect.prompts)} hold one prompt of this size; a fit and its test "
                "want one each at least"
            )
        self._session = Generator(
            target,
            drafter,
            mode="static",
            batch=min(collect.batch, len(self.prompts) * collect.samples_per_prompt),
            max_context=collect.max_context,
            chunk_steps=CHUNK_STEPS,
            record_confidences=True,
        )
        template = template_digest(text, collect.thinking)
        self._source = record_source(self._session, self._params(0.0, 0, 0), template)

    def fingerprint(self) -> dict[str, Any]:
        """What must not change when a job goes on: prompts, template and drafter."""
        prompts = hashlib.sha256(repr(self.prompts).encode()).hexdigest()
        return {
            "prompts_sha256": prompts,
            "prompts": len(self.prompts),
            "template_sha256": self._source.template_sha256,
            "drafter_sha256": self._source.drafter_sha256,
        }

    def records(self, folder: Path, temperature: float, stop: Stop) -> Records:
        """Records at one sampling temperature, in ``folder`` and returned.

        Every answer is kept as it ends and has its own seed, so a job that goes on after any end
        writes what an unbroken one would have written. Greedy samples of a prompt are all the
        same, so it gets one.

        Raises:
            Stopped: a signal came; the answers that had ended are kept.
        """
        path = folder / f"records-T{temperature:g}.jsonl"
        if path.exists():
            return read_records(path)
        samples = self._collect.samples_per_prompt if temperature > 0 else 1
        requests = {
            (index, sample): Request(ids, self._params(temperature, index, sample))
            for index, ids in enumerate(self.prompts)
            for sample in range(samples)
        }
        journal = Journal(folder / f"answers-T{temperature:g}.jsonl")
        done = [answer for key, answer in journal.kept.items() if key in requests]
        blocks = sum(len(answer.commits) for answer in done)
        title = "greedy answers" if temperature == 0 else f"answers at temperature {temperature:g}"
        try:
            with progress_bar(title, len(requests), len(done)) as advance:

                def count(_: Key, answer: Completion) -> None:
                    nonlocal blocks
                    blocks += len(answer.commits)
                    advance(1, f"{blocks:,} blocks")

                answers = answer_all(self._session, requests, journal, stop, count)
        finally:
            journal.close()
        found = tuple(answer_record(answers[key], self.prompts[key[0]]) for key in sorted(answers))
        records = Records(dataclasses.replace(self._source, temperature=temperature), found)
        write_records(path, records)
        journal.remove()
        return records

    def _params(self, temperature: float, index: int, sample: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_k=self._collect.top_k,
            top_p=self._collect.top_p,
            seed=request_seed(self._collect.seed, index, sample),
            max_new_tokens=self._collect.max_new_tokens,
        )


def _prompt_ids(collect: CollectSection, text: Text) -> list[tuple[int, ...]]:
    """First turns of all files as served, in order, each but once."""
    found: dict[tuple[int, ...], None] = {}
    for file in collect.prompts:
        for number, line in enumerate(read_prompts(Path(file)), 1):
            if "turns" not in line:
                raise ValueError(f"{file}, prompt {number}: wanted turns, a list of strings")
            message = {"role": "user", "content": line["turns"][0]}
            found[tuple(text.chat_ids([message], collect.thinking))] = None
    return list(found)
