"""What an engine measures of itself, from outcomes that it has copied back anyway. Host only."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dspark_jax.calibration.live import LiveCalibration
from dspark_jax.calibration.online import DECAY
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.request import FinishReason, Service
from dspark_jax.engine.block_counts import BlockCounts, drafts
from dspark_jax.engine.cost_correction import CostCorrection
from dspark_jax.engine.figures import Figure, Histogram
from dspark_jax.engine.flight import Flight, Leg
from dspark_jax.engine.lanes import Report
from dspark_jax.engine.scheduler import Scheduler
from dspark_jax.engine.sequence import Sequence
from dspark_jax.schedule.cost import CostTables

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STEP_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
MOST_BLOCKS = 1024
"""Blocks of a dispatch that calibration is judged by; of more, every second and so on."""
BUDGETS = (0, *(2**power for power in range(14)))


class Metrics:
    """Sums over everything that has been read.

    Args:
        config: the step.
        stepping: the step as it is taken by so many lanes.
        costs: tables on the host by lanes and pieces of prompts; asked when the first step is read.
        scheduler: queue and pages; what it has counted before is left out.
        correction: is told what steps took, where that is known; None corrects nothing.
        clock: seconds that only grow.
        before: whose place these take: what is in flight was sent while it counted.
    """

    def __init__(
        self,
        config: StepConfig,
        stepping: Callable[[StepConfig, int], StepConfig],
        costs: Callable[[], Mapping[tuple[int, int], CostTables]],
        scheduler: Scheduler,
        correction: CostCorrection | None = None,
        clock: Callable[[], float] = time.perf_counter,
        before: Metrics | None = None,
    ) -> None:
        self.clock = clock
        self._config, self._costs = config, costs

        @functools.cache
        def buckets_of(batch: int) -> tuple[int, ...]:
            return stepping(config, batch).buckets or (batch * config.width,)

        self._buckets_of = buckets_of
        self._scheduler, self._before = scheduler, _counted(scheduler)
        self._correction = correction
        depth = config.depth
        self._sums: dict[str, Any] = Counter()  # whole numbers and seconds
        self._finished: Counter[str] = Counter()
        self._buckets: Counter[str] = Counter()
        self._blocks = BlockCounts(config.width)
        self._budgets = Histogram(BUDGETS)
        self._step_seconds = Histogram(STEP_SECONDS)
        self._queue = Histogram(SECONDS)
        self._first = Histogram(SECONDS)
        self._whole = Histogram(SECONDS)
        self._calibration = LiveCalibration(depth, DECAY)
        self._read_at, self._waited = -np.inf, False
        if before is not None:
            self._read_at, self._waited = before._read_at, before._waited

    def joined(self, sequence: Sequence, now: float) -> None:
        """The sequence takes part in a dispatch; the first time ends its wait."""
        if sequence.joined is not None:
            return
        sequence.joined = now
        self._sums["prompt_tokens"] += len(sequence.job.prompt_ids)
        if sequence.arrived is not None:
            self._queue.add(now - sequence.arrived)

    def read(self, flight: Flight, report: Report, rows: np.ndarray) -> np.ndarray | None:
        """Take over a dispatch that has just been read.

        Args:
            rows: ``[L]`` live cache rows of its lanes before it.

        Returns:
            ``[L]`` accepted drafts that were expected of its windows; None without confidences.
        """
        outcome, decision, sums = report.outcome, report.outcome.decision, self._sums
        blocks = [np.asarray(one) for one in (outcome.count, outcome.window, outcome.accepted)]
        count, window, _ = blocks
        live = count > 0
        self._blocks.add(live, *blocks)
        if outcome.bounds is not None:
            for name in ("blocks", "low", "high"):
                sums[f"bounded_{name}"] += getattr(outcome.bounds, name).sum().item()
        users = live.sum(axis=1)
        verified = users + (window * live).sum(axis=1)
        depth = np.zeros(len(count), np.int32) if decision is None else np.asarray(decision.depth)
        sums["steps"] += len(count)
        expected = None
        if decision is not None:
            budgets = np.asarray(decision.budget).tolist()
            steps = zip(users.tolist(), depth.tolist(), budgets, strict=True)
            for requests, walked, budget in steps:
                if not requests:
                    continue  # it reads prompts and nothing else
                sums["drafted_blocks"] += requests if walked else 0
                sums["skips"] += bool(self._config.drafts and not walked)
                self._budgets.add(budget)
            if decision.confidence is not None:
                expected = self._believe(decision.confidence, *blocks)
        # live cache rows of everyone who decodes, before each step
        contexts = ((rows + count.cumsum(axis=0) - count) * live).sum(axis=1)
        begin = 0
        for leg in flight.legs:
            assert leg.ended is not None, "a dispatch is read before it is counted"
            seconds = leg.ended - max(flight.sent, self._read_at)
            # Read late, it may have ended long before; launched late, have begun long after.
            exact = leg.waited and self._waited and leg.ahead
            self._read_at, self._waited = leg.ended, leg.waited
            steps = slice(begin, begin := begin + leg.steps)
            counted = users[steps], verified[steps], depth[steps], contexts[steps]
            self._time(flight.batch, leg, seconds / leg.steps, *counted, exact=exact)
        return expected

    def ended(self, sequence: Sequence, reason: FinishReason) -> Service:
        """Count an answer; how it was served."""
        now = self.clock()
        self._finished[reason] += 1
        arrived = now if sequence.arrived is None else sequence.arrived

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - arrived

        service = Service(
            queue_seconds=since(sequence.joined),
            first_token_seconds=since(sequence.first_token),
            seconds=now - arrived,
            preemptions=sequence.preemptions,
            reused_rows=sequence.reused_rows,
            expected_accepted=sequence.expected,
        )
        if reason != "abort":
            self._whole.add(service.seconds)
            if service.first_token_seconds is not None:
                self._first.add(service.first_token_seconds)
        return service

    def _believe(self, confidence: Any, *blocks: np.ndarray) -> np.ndarray:
        """Compare survivals with what happened; drafts expected to be accepted by lane."""
        proposed, accepted = drafts(*blocks)
        # A position after the other: what is added up lies side by side. Not walked is NaN.
        survival = np.fmax(np.asarray(confidence).transpose(2, 0, 1), 0.0, order="C")
        for before, column in itertools.pairwise(survival):
            column *= before
        position = np.arange(len(survival), dtype=proposed.dtype)[:, None, None]
        expected = (survival * (position < proposed)).sum(axis=0)
        self._sums["expected"] += float(expected.sum(dtype=np.float64))
        stride = -(-proposed.size // MOST_BLOCKS)
        self._calibration.observe(
            survival.reshape(len(survival), -1)[:, ::stride].T,
            proposed.ravel()[::stride],
            accepted.ravel()[::stride],
            steps=len(proposed),
        )
        return expected.sum(axis=0)

    def _time(
        self,
        batch: int,
        leg: Leg,
        seconds: float,
        users: np.ndarray,
        rows: np.ndarray,
        depth: np.ndarray,
        contexts: np.ndarray,
        *,
        exact: bool,
    ) -> None:
        """Rows and seconds of each step, and the seconds that the cost table gives it."""
        sums, mode, width = self._sums, self._config.mode, self._config.width
        tables, buckets = self._costs()[batch, leg.pieces], self._buckets_of(batch)
        if mode == "cap-accept":
            rows = users * width
        if mode != "compact":
            bucket = [batch * width] * len(rows)
        elif leg.shape is not None:
            bucket = [leg.shape.rows] * len(rows)
        else:
            bucket = [buckets[bisect.bisect_left(buckets, size)] for size in rows.tolist()]
        sizes = rows.tolist() if mode == "compact" and leg.shape is None else bucket
        self._step_seconds.add(seconds, times=len(bucket))
        for size, used in zip(bucket, rows.tolist(), strict=True):
            if used:
                self._buckets[str(size)] += 1
                sums["rows"] += used
                sums["bucket_rows"] += size
        if not tables.known or seconds <= 0:
            return
        verify, draft = np.zeros(len(buckets)), 0.0
        kinds = list(zip(sizes, bucket, depth.tolist(), strict=True))
        # mostly one kind a leg
        for kind, alike in itertools.groupby(range(len(kinds)), kinds.__getitem__):
            size, ran, walked = kind
            at = contexts[[*alike]]
            verified = np.interp(at, tables.contexts, tables.verify[:, size])
            verify[buckets.index(ran)] += verified.sum()
            drafted = np.zeros(1)
            if walked:
                drafted = np.interp(at, tables.contexts, tables.draft[:, batch])
                drafted *= tables.walk[walked - 1]
                draft += float(drafted.sum())
            predicted = verified + drafted
            sums["predicted_seconds"] += float(predicted.sum())
            if exact:
                sums["relative_error"] += float(np.abs(predicted - seconds).sum()) / seconds
        sums["measured_seconds"] += seconds * len(bucket)
        if not exact:
            return
        sums["timed_steps"] += len(bucket)
        if self._correction is not None:
            program = batch, leg.pieces
            self._correction.observe(program, verify, draft, seconds * len(bucket))

    def figures(self) -> list[Figure]:
        """Everything, as it stands."""
        sums, scheduler = Counter(self._sums) + Counter(self._blocks.totals()), self._scheduler
        positions = self._blocks.by_position()
        windows = Histogram(range(self._config.width))
        windows.counts, windows.sum = self._blocks.windows(), float(sums["windows"])
        store, counted = scheduler.store, _counted(scheduler)
        counted.subtract(self._before)

        def ratio(above: float, below: float) -> float | None:
            return above / below if below else None

        def by_position(values: Any) -> dict[str, float]:
            return {str(j): one for j, one in enumerate(values.tolist(), 1)}

        def counter(name: str, unit: str, meaning: str, value: Any, label: str | None = None):
            return Figure(f"{name}_total", "counter", unit, meaning, value, label)

        def gauge(name: str, unit: str, meaning: str, value: Any, label: str | None = None):
            return Figure(name, "gauge", unit, meaning, value, label)

        def histogram(name: str, unit: str, meaning: str, value: Histogram):
            return Figure(name, "histogram", unit, meaning, value)

        steps, blocks = sums["steps"], sums["verifications"]
        used = store.count - store.free
        block = None
        if self._config.mode == "cap-accept":
            block = ratio(sums["tokens"] + sums["trimmed"], blocks)
        pages = {"used": used, "cached": store.cached, "blank": store.free - store.cached}
        return [
            gauge("num_requests_running", "requests", "In a slot.", len(scheduler.running)),
            gauge("num_requests_waiting", "requests", "In the queue.", len(scheduler.waiting)),
            counter(
                "num_preemptions", "1", "Requests that lost their pages.", counted["preempted"]
            ),
            counter(
                "request_success",
                "requests",
                "Ended requests by reason.",
                dict(self._finished),
                "finished_reason",
            ),
            counter("prompt_tokens", "tokens", "Prompts that joined.", sums["prompt_tokens"]),
            counter("generation_tokens", "tokens", "Committed by steps.", sums["tokens"]),
            histogram("request_queue_time_seconds", "s", "Arrival to first step.", self._queue),
            histogram("time_to_first_token_seconds", "s", "Arrival to first token.", self._first),
            histogram("e2e_request_latency_seconds", "s", "Arrival to answer.", self._whole),
            gauge("kv_cache_usage_perc", "share", "Pages in use.", used / store.count),
            gauge("num_pages", "pages", "Pages by what they hold.", pages, "state"),
            counter(
                "prefix_cache_queries",
                "tokens",
                "Rows looked for in pages.",
                counted["sought_rows"],
            ),
            counter("prefix_cache_hits", "tokens", "Rows found there.", counted["reused_rows"]),
            counter("steps", "steps", "Steps read.", steps),
            counter("spec_verify_calls", "1", "Windows verified, one a request and step.", blocks),
            histogram("step_seconds", "s", "A step, prompts in it included.", self._step_seconds),
            counter(
                "step_time_measured_seconds",
                "s",
                "Steps that the cost table predicts.",
                float(sums["measured_seconds"]),
            ),
            counter(
                "step_time_predicted_seconds",
                "s",
                "The same steps, by the cost table.",
                float(sums["predicted_seconds"]),
            ),
            gauge(
                "step_time_relative_error",
                "share",
                "Mean of |predicted - measured| / measured, of steps that the host waited for.",
                ratio(sums["relative_error"], sums["timed_steps"]),
            ),
            gauge(
                "cost_factor",
                "1",
                "What the cost table is multiplied by, lanes x rows + pieces of prompts.",
                {} if self._correction is None else self._correction.factors(),
                "program",
            ),
            counter("spec_decode_num_drafts", "1", "Blocks drafted.", sums["drafted_blocks"]),
            counter(
                "spec_decode_num_draft_tokens", "tokens", "Drafts in windows.", sums["proposed"]
            ),
            counter(
                "spec_decode_num_accepted_tokens", "tokens", "Drafts committed.", sums["accepted"]
            ),
            counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "tokens",
                "Drafts committed by position.",
                by_position(positions["accepted"]),
                "position",
            ),
            counter(
                "spec_decode_num_verified_tokens_per_pos",
                "tokens",
                "Drafts in windows by position.",
                by_position(positions["verified"]),
                "position",
            ),
            counter(
                "spec_decode_num_reached_tokens_per_pos",
                "tokens",
                "Drafts in windows whose predecessors were all accepted.",
                by_position(positions["reached"]),
                "position",
            ),
            counter(
                "spec_decode_num_expected_tokens",
                "tokens",
                "Drafts expected to be committed: the survivals of those in windows.",
                float(sums["expected"]),
            ),
            gauge(
                "spec_accept_length",
                "tokens",
                "Tokens a window, bonus included.",
                ratio(sums["tokens"], blocks),
            ),
            gauge(
                "spec_accept_rate",
                "share",
                "Drafts committed of those in windows.",
                ratio(sums["accepted"], sums["proposed"]),
            ),
            gauge(
                "spec_cap_length",
                "tokens",
                "Rows a window, anchor included.",
                ratio(sums["windows"] + blocks, blocks),
            ),
            gauge(
                "spec_block_accept_length",
                "tokens",
                "Tokens a window had everything drafted been committed; cap-accept only.",
                block,
            ),
            gauge(
                "spec_block_accept_length_low",
                "tokens",
                "The same, at least, as far as later rows tell; needs bound_blocks.",
                ratio(sums["bounded_low"], sums["bounded_blocks"]),
            ),
            gauge(
                "spec_block_accept_length_high",
                "tokens",
                "The same, at most.",
                ratio(sums["bounded_high"], sums["bounded_blocks"]),
            ),
            counter(
                "spec_cap_trim_tokens",
                "tokens",
                "Drafts that windows cut and verification accepted; cap-accept only.",
                sums["trimmed"],
            ),
            counter("draft_skips", "steps", "Steps without drafts.", sums["skips"]),
            histogram("verify_window_tokens", "tokens", "Drafts of a window.", windows),
            histogram("verify_budget_tokens", "tokens", "Budget of a step.", self._budgets),
            counter("verify_rows", "tokens", "Rows of windows.", sums["rows"]),
            counter(
                "verify_bucket_rows", "tokens", "Rows that steps ran for.", sums["bucket_rows"]
            ),
            gauge(
                "verify_bucket_fill",
                "share",
                "Rows of windows of those that steps ran for.",
                ratio(sums["rows"], sums["bucket_rows"]),
            ),
            counter(
                "verify_bucket_steps",
                "steps",
                "Steps by the rows they ran for.",
                dict(self._buckets),
                "rows",
            ),
            gauge(
                "confidence_ece",
                "share",
                "Calibration error of survival in the last thousand steps.",
                by_position(self._calibration.recent.error),
                "position",
            ),
            gauge(
                "confidence_ece_lifetime",
                "share",
                "The same since the start: what has drifted differs.",
                by_position(self._calibration.lifetime.error),
                "position",
            ),
            gauge(
                "confidence_bias",
                "share",
                "Predicted survival less the share accepted, in the last thousand steps.",
                by_position(self._calibration.recent.bias),
                "position",
            ),
        ]


def _counted(scheduler: Scheduler) -> Counter[str]:
    return Counter(
        preempted=scheduler.preemptions,
        sought_rows=scheduler.sought_rows,
        reused_rows=scheduler.reused_rows,
    )
