"""A session: prompts in, answers out, with slots refilled as answers end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.calibration.file import Calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import Mode, Policy, StepConfig
from dspark_jax.decode.interrupt import Interrupt
from dspark_jax.decode.job import Job, make_job
from dspark_jax.decode.request import Completion, Request, SamplingParams, check_whole, refuse
from dspark_jax.decode.run import Run
from dspark_jax.decode.setup import (
    cache_dtype,
    check_pair,
    compact_buckets,
    context_limit,
    default_mode,
    depth_caps,
    resolve_calibration,
    tables_for,
    variant,
)
from dspark_jax.decode.slots import SlotPrograms
from dspark_jax.decode.step import Weights
from dspark_jax.decode.stops import StopAwareStream
from dspark_jax.schedule.cost import CostTables

logger = logging.getLogger(__name__)

STREAM_STEPS = 4
"""Steps between two looks at a streamed answer."""


class Generator:
    """Answers requests with one target, one drafter and one set of shapes.

    Args:
        target: a loaded target.
        drafter: a loaded drafter that fits it, or None for plain decoding.
        batch: requests decoded together (slots).
        max_context: most tokens of prompt and answer together; at most what the target was
            made for. Defaults to 2048 or that, whichever is smaller.
        mode: "off", "static", "compact" or "cap-accept". Defaults to "compact", to "static"
            for a drafter without confidence head, to "off" without a drafter.
        k: drafts walked and verified in a block; defaults to the drafter's block size.
        policy: "lagged", "causal" or "fresh".
        lag: age in steps of the confidences that decide a "lagged" budget.
        allow_biased: consent to policy "fresh" at temperatures above 0, which changes the
            distribution of the output.
        cost_table: a cost table, or the path of one. Without one everything drafted is verified.
        calibration: STS temperatures, or the path of a calibration file.
        buckets: token counts that a compact verify is padded to; None picks them.
        walk_caps: draft depths that the sequential head may stop at; None picks them.
        chunk_steps: steps run on the device between two looks of the host.
        record_confidences: report every step's confidence logits with the answers.

    Raises:
        ValueError: anything that does not fit together, both values named; nothing has been
            compiled then.
        NotImplementedError: a parameter that is not supported yet.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None = None,
        *,
        batch: int = 1,
        max_context: int | None = None,
        mode: Mode | None = None,
        k: int | None = None,
        policy: Policy = "lagged",
        lag: int = 1,
        allow_biased: bool = False,
        cost_table: CostTables | str | Path | None = None,
        calibration: Calibration | str | Path | None = None,
        buckets: tuple[int, ...] | None = None,
        walk_caps: tuple[int, ...] | None = None,
        chunk_steps: int = 32,
        record_confidences: bool = False,
        **not_yet: Any,
    ) -> None:
        refuse(not_yet)
        if not_yet:
            raise TypeError(f"Generator has no parameter {next(iter(not_yet))!r}")
        for name, value in (("batch", batch), ("chunk_steps", chunk_steps)):
            check_whole(name, value)
            if value < 1:
                raise ValueError(f"{name} is {value}; wanted 1 or more")
        for name, value in (("lag", lag), ("k", k), ("max_context", max_context)):
            if value is not None:
                check_whole(name, value)
        mode = mode or default_mode(drafter)
        if mode == "off":
            drafter = None
        self.target, self.drafter = target, drafter
        self.context = context_limit(target.config, max_context)
        self.allow_biased = allow_biased
        self.chunk_steps = chunk_steps
        if drafter is not None:
            check_pair(target, drafter)
        config = StepConfig(
            target=target.config,
            drafter=None if drafter is None else drafter.config,
            mode=mode,
            k=k,
            policy=policy,
            lag=lag,
            record_confidences=record_confidences,
        )
        if config.mode == "compact":
            config = dataclasses.replace(
                config, buckets=compact_buckets(buckets, batch, config.width)
            )
        elif buckets is not None:
            raise ValueError(
                f"buckets are {buckets} in mode {config.mode!r}, whose verifies have one size; "
                'wanted mode "compact", or no buckets'
            )
        self._calibration = resolve_calibration(calibration, drafter)
        tables = tables_for(target, drafter, config, cost_table, self._calibration, batch=batch)
        if config.adaptive:
            config = dataclasses.replace(
                config, walk_caps=depth_caps(walk_caps, config.depth, cost_table is not None)
            )
            if cost_table is None:
                logger.warning("no cost table: every drafted token is verified")
        elif walk_caps is not None:
            raise ValueError(
                f"walk_caps are {walk_caps} in mode {config.mode!r}, which walks whole blocks or "
                'none; wanted mode "compact" or "cap-accept", or no walk_caps'
            )
        self.config = config
        self._programs = SlotPrograms(
            weights=Weights(target.weights, None if drafter is None else drafter.weights),
            tables=tables,
            slots=batch,
            context=self.context,
            dtype=cache_dtype(target),
        )
        self._told: set[str] = set()

    @property
    def batch(self) -> int:
        """Requests decoded together."""
        return self._programs.slots

    @property
    def calibration(self) -> Calibration | None:
        """STS temperatures in use; None when confidences are taken as the head gives them."""
        return self._calibration if isinstance(self._calibration, Calibration) else None

    def warmup(self, *params: SamplingParams) -> None:
        """Compile what requests like these need; later ones of the same kind trace nothing.

        Programs differ by three facts about a batch: whether any request samples, whether any
        uses top-k or top-p, and how many logprobs are asked for. No argument means greedy.
        """
        config = self._variant(params or (SamplingParams(),))
        self._programs.compile(config, [self._steps(streamed) for streamed in (False, True)])

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_text: Callable[[str], None] | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
        interrupt: Interrupt | None = None,
    ) -> list[Completion]:
        """Answer every request, in order.

        Ctrl-C ends the call early: answers so far come back with ``finish_reason`` "abort".

        Args:
            requests: any number; those beyond ``batch`` wait for a free slot.
            on_text: called with pieces of text as they become certain; one request only.
            on_completion: called with the index and the answer of each request as it ends;
                an aborted one has not ended.
            interrupt: entered by the caller, when one Ctrl-C is to end several calls: it may
                fall where every answer of this call is already on its way.

        Raises:
            ValueError: a request that cannot be answered; nothing has been compiled or run.
        """
        jobs = [self._job(index, request) for index, request in enumerate(requests)]
        if on_text is not None:
            self._stream_to(on_text, jobs)
        if not jobs:
            return []
        run = Run(
            self._programs,
            self._variant([job.params for job in jobs]),
            self.target.text,
            jobs,
            steps=self._steps(streamed=on_text is not None),
            on_completion=on_completion,
        )
        if interrupt is not None:
            run.until_done(interrupt)
        else:
            with Interrupt() as own:
                run.until_done(own)
        return run.completions()

    def _steps(self, streamed: bool) -> int:
        """Steps between two looks at the answers."""
        return min(STREAM_STEPS, self.chunk_steps) if streamed else self.chunk_steps

    def _variant(self, params: Sequence[SamplingParams]) -> StepConfig:
        """The step that serves these requests and does nothing they do not need."""
        return variant(self.config, params)

    def _job(self, index: int, request: Request) -> Job:
        """Check a request and encode its prompt."""
        job = make_job(
            index,
            request,
            self.target,
            self.config,
            context=self.context,
            allow_biased=self.allow_biased,
        )
        if isinstance(self._calibration, Calibration) and self.config.adaptive:
            self._tell(self._calibration.distant(request.params.temperature))
        return job

    def _stream_to(self, on_text: Callable[[str], None], jobs: Sequence[Job]) -> None:
        if len(jobs) != 1:
            raise ValueError(f"on_text follows one request, {len(jobs)} were given")
        if self.target.text is None:
            raise ValueError(f"on_text needs a tokenizer; target {self.target.name} has none")
        jobs[0].stream = StopAwareStream(on_text, self.target.text.stream(), jobs[0].params.stop)

    def _tell(self, message: str | None) -> None:
        """Warn once a session."""
        if message and message not in self._told:
            self._told.add(message)
            logger.warning(message)
