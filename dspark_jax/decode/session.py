"""A session: prompts in, answers out, with slots refilled as answers end."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.calibration.file import Calibration, load_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import Mode, Policy, StepConfig
from dspark_jax.decode.interrupt import Interrupt
from dspark_jax.decode.request import (
    MAX_STOP_IDS,
    Completion,
    Request,
    SamplingParams,
    check_whole,
    refuse,
)
from dspark_jax.decode.run import Job, Run
from dspark_jax.decode.slots import SlotPrograms
from dspark_jax.decode.step import Weights
from dspark_jax.decode.stops import StopAwareStream
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.validate import check_fits
from dspark_jax.schedule.cost import CostTables, load_costs, no_costs, with_calibration

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 2048
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
        mode = mode or _default_mode(drafter)
        if mode == "off":
            drafter = None
        self.target, self.drafter = target, drafter
        self.context = _context(target.config, max_context)
        self.allow_biased = allow_biased
        self.chunk_steps = chunk_steps
        if drafter is not None:
            _check_pair(target, drafter)
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
            config = dataclasses.replace(config, buckets=_buckets(buckets, batch, config.width))
        dtype = config.target.family.input_embedding(target.weights).dtype
        self._calibration = calibration
        tables = self._tables(config, cost_table, batch, dtype)
        if config.adaptive:
            config = dataclasses.replace(
                config, walk_caps=_walk_caps(walk_caps, config.depth, cost_table is not None)
            )
            if cost_table is None:
                logger.warning("no cost table: every drafted token is verified")
        self.config = config
        self._programs = SlotPrograms(
            weights=Weights(target.weights, None if drafter is None else drafter.weights),
            tables=tables,
            slots=batch,
            context=self.context,
            dtype=dtype,
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
        self._programs.compile(self._variant(params or (SamplingParams(),)))

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
            steps=self.chunk_steps if on_text is None else min(STREAM_STEPS, self.chunk_steps),
            on_completion=on_completion,
        )
        if interrupt is not None:
            run.until_done(interrupt)
        else:
            with Interrupt() as own:
                run.until_done(own)
        return run.completions()

    def _tables(
        self, config: StepConfig, cost_table: CostTables | str | Path | None, batch: int, dtype: Any
    ) -> CostTables:
        """Costs and temperatures for the drafts this session walks."""
        if self.drafter is None:
            return no_costs(batch, 0)
        block_size = self.drafter.config.block_size
        if cost_table is None:
            tables = no_costs(batch, block_size)
        elif isinstance(cost_table, CostTables):
            tables = cost_table
            found = (tables.verify.shape[1], tables.draft.shape[1], tables.temperatures.shape[1])
            wanted = (batch * (block_size + 1) + 1, batch + 1, block_size)
            if found != wanted:
                raise ValueError(
                    f"cost tables cover (verify sizes, draft sizes, positions) {found}; a batch "
                    f"of {batch} and block size {block_size} want {wanted}"
                )
        else:
            tables = load_costs(
                cost_table,
                slots=batch,
                block_size=block_size,
                buckets=config.buckets or None,
                device=jax.devices()[0].device_kind,
                model=self.target.name,
                dtype=np.dtype(dtype).name,
            )
        if self._calibration is not None:
            if not isinstance(self._calibration, Calibration):
                self._calibration = load_calibration(self._calibration, block_size=block_size)
            tables = with_calibration(tables, self._calibration)
        shorter = tables.temperatures[:, : config.depth]
        return dataclasses.replace(tables, temperatures=shorter)

    def _variant(self, params: Sequence[SamplingParams]) -> StepConfig:
        """The step that serves these requests and does nothing they do not need."""
        wanted = [one.logprobs for one in params if one.logprobs is not None]
        sampled = [one for one in params if one.temperature > 0]
        return dataclasses.replace(
            self.config,
            sampled=bool(sampled),
            filtered=any(one.top_k > 0 or one.top_p < 1 for one in sampled),
            logprobs=max(wanted) if wanted else None,
        )

    def _job(self, index: int, request: Request) -> Job:
        """Check a request and encode its prompt."""
        params, text = request.params, self.target.text
        where = f"request {index}"
        if isinstance(request.prompt, str):
            if text is None:
                raise ValueError(
                    f"{where} has a text prompt, but target {self.target.name} has no tokenizer: "
                    "give token ids"
                )
            prompt_ids = tuple(text.encode(request.prompt))
        else:
            prompt_ids = tuple(request.prompt)
        if not prompt_ids:
            raise ValueError(f"{where} has an empty prompt; wanted at least one token")
        vocab_size = self.target.config.vocab_size
        stop_ids = tuple(dict.fromkeys((*self.target.stop_token_ids, *params.stop_token_ids)))
        for name, ids in (("prompt", prompt_ids), ("stop_token_ids", stop_ids)):
            for token_id in ids:
                if not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{where}: {name} holds token id {token_id!r}; the target's vocabulary "
                        f"has ids 0..{vocab_size - 1}"
                    )
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"{where} has {len(stop_ids)} stop ids with the target's own; "
                f"at most {MAX_STOP_IDS} are supported"
            )
        if len(prompt_ids) >= self.context:
            raise ValueError(
                f"{where} has a prompt of {len(prompt_ids)} tokens; a context of {self.context} "
                f"holds at most {self.context - 1} and an answer"
            )
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise ValueError(
                f"{where}: logprobs is {params.logprobs}, the vocabulary has {vocab_size} tokens"
            )
        if params.stop and text is None:
            raise ValueError(
                f"{where} has stop strings {params.stop}, but target {self.target.name} has no "
                "tokenizer: use stop_token_ids"
            )
        fresh = self.config.adaptive and self.config.policy == "fresh"
        if fresh and params.temperature > 0 and not self.allow_biased:
            raise ValueError(
                f'{where}: policy "fresh" at temperature {params.temperature} changes the '
                "distribution of the output; allow it with allow_biased, or use policy "
                '"lagged" or "causal"'
            )
        if isinstance(self._calibration, Calibration) and self.config.adaptive:
            self._tell(self._calibration.distant(params.temperature))
        seed = secrets.randbits(32) if params.seed is None else params.seed
        return Job(index, tuple(map(int, prompt_ids)), params, seed, stop_ids)

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


def _default_mode(drafter: LoadedDrafter | None) -> Mode:
    if drafter is None:
        return "off"
    return "compact" if drafter.config.enable_confidence_head else "static"


def _context(config: Any, max_context: int | None) -> int:
    """Tokens of prompt and answer together, within what the target was made for."""
    limit = getattr(config, "max_position_embeddings", None)
    if max_context is None:
        return DEFAULT_CONTEXT if limit is None else min(DEFAULT_CONTEXT, limit)
    if max_context < 2:
        raise ValueError(f"max_context is {max_context}; wanted 2 or more")
    if limit is not None and max_context > limit:
        raise ValueError(f"max_context is {max_context}, but the target was made for {limit}")
    return max_context


def _check_pair(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    if isinstance(drafter.config, DrafterConfig):
        check_fits(drafter.config, target.config, {"stop": target.stop_token_ids})
    elif drafter.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the drafter's vocab_size is {drafter.config.vocab_size}, "
            f"the target has {target.config.vocab_size}"
        )


def _buckets(buckets: tuple[int, ...] | None, batch: int, width: int) -> tuple[int, ...]:
    """Token counts of compact verifies; every anchor alone, and two steps up to full windows."""
    full = batch * width
    if buckets is None:
        return tuple(sorted({max(batch, full // part) for part in (4, 2, 1)} | {batch}))
    increasing = all(a < b for a, b in itertools.pairwise(buckets))
    if not buckets or buckets[-1] != full or buckets[0] < 1 or not increasing:
        raise ValueError(
            f"buckets are {buckets}; wanted increasing token counts that end at {full}, "
            f"the full windows of {batch} requests"
        )
    return buckets


def _walk_caps(caps: tuple[int, ...] | None, depth: int, priced: bool) -> tuple[int, ...]:
    """Depths the sequential head may stop at; without costs it never stops early."""
    if caps is not None:
        increasing = all(a < b for a, b in itertools.pairwise(caps))
        if not caps or caps[-1] != depth or caps[0] < 1 or not increasing:
            raise ValueError(
                f"walk_caps are {caps}; wanted increasing depths of 1 or more that end at {depth}"
            )
        return caps
    return (*(cap for cap in (1, 2, 4) if cap < depth), depth) if priced else (depth,)
