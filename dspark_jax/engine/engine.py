"""A running batch that requests join and leave at any step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

from dspark_jax.calibration.file import Calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import Shape, StepConfig
from dspark_jax.decode.job import make_job
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.run import FINISH
from dspark_jax.decode.setup import (
    cache_dtype,
    context_limit,
    depth_caps,
    resolve_calibration,
    tables_for,
)
from dspark_jax.decode.state import RUNNING
from dspark_jax.decode.step import Weights
from dspark_jax.decode.stops import StopAwareStream
from dspark_jax.engine.answer import Ending, absorb_logprobs, complete, ending, show
from dspark_jax.engine.config import EngineConfig, check_prompt_width
from dspark_jax.engine.cost_correction import CostCorrection
from dspark_jax.engine.figures import Figure
from dspark_jax.engine.flight import Flight
from dspark_jax.engine.host_time import HostTime
from dspark_jax.engine.lanes import Report
from dspark_jax.engine.metrics import Metrics
from dspark_jax.engine.programs import Programs
from dspark_jax.engine.scheduler import Scheduler
from dspark_jax.engine.sequence import Sequence, Stage
from dspark_jax.engine.served import reuses_prefixes, served_step
from dspark_jax.engine.shapes import ShapeChoice, every_shape, paying_shapes
from dspark_jax.schedule.cost import CostTables

logger = logging.getLogger(__name__)


class Engine:
    """Serves many requests with one target and one drafter.

    A step is prepared while the one before runs on the device: what a step did is read when the
    next has been dispatched, and every decision is made from what was read then.

    Args:
        target: a loaded target whose family has paged caches.
        drafter: a loaded drafter that fits it, or None for plain decoding.
        config: see `EngineConfig`.

    Raises:
        ValueError: anything that does not fit together, with what was wanted; nothing has been
            compiled then.
        NotImplementedError: a target or drafter without paged caches.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        config = config or EngineConfig()
        step = served_step(target, drafter, config)
        if not step.drafts:
            drafter = None
        reuse = reuses_prefixes(target, drafter, config)
        self.target, self.drafter, self.config = target, drafter, config
        self.context = context_limit(target.config, config.max_context)
        pool, columns = config.pool(self.context), config.columns(self.context)
        pieces = config.pieces(step.width)
        self._calibration = resolve_calibration(config.calibration, drafter)
        priced = config.priced
        if step.adaptive and not priced and config.threshold is None:
            logger.warning("no cost table: every drafted token is verified")
        self.step_config = step
        check_prompt_width(config.prompt_width, jax.default_backend())

        shaped = step.adaptive and step.policy == "lagged" and priced

        @functools.cache
        def shapes(batch: int, prompt_rows: int) -> tuple[Shape, ...]:
            if not shaped:
                return ()
            depths = depth_caps(None, step.depth, priced)
            if prompt_rows:
                every = shapes(batch, 0)
            else:
                every = every_shape(config.row_counts(step.width, batch), batch, depths)
            if isinstance(config.cost_table, CostTables):
                return every
            costs = tables(batch, prompt_rows, with_rows(every))
            return paying_shapes(every, batch, depths, costs)

        def with_rows(shapes: tuple[Shape, ...]) -> StepConfig:
            return dataclasses.replace(step, buckets=tuple(shape.rows for shape in shapes))

        def stepping(step: StepConfig, batch: int) -> StepConfig:
            if not shaped:
                return config.stepping(step, batch)
            return dataclasses.replace(step, buckets=with_rows(shapes(batch, 0)).buckets)

        def tables(batch: int, prompt_rows: int, tier: StepConfig | None = None) -> CostTables:
            given = config.cost_table
            return tables_for(
                target,
                drafter,
                tier or stepping(step, batch),
                given,
                self._calibration,
                # tables in memory cover the whole engine, and so every part of it
                batch=config.max_requests if isinstance(given, CostTables) else batch,
                prompt_rows=prompt_rows,
            )

        tables(config.max_requests, 0)
        self._choice = None
        if shaped:
            self._choice = ShapeChoice(config.max_requests, step)
        self._scheduler = Scheduler(
            pool,
            slots=config.max_requests,
            width=step.width,
            pieces=pieces,
            prompt_width=config.prompt_width,
            steps=config.dispatch_steps,
            prefix_reuse=reuse,
        )
        self._programs = Programs(
            weights=Weights(target.weights, None if drafter is None else drafter.weights),
            roster=self._scheduler.roster,
            config=step,
            stepping=stepping,
            tables=tables,
            shapes=shapes,
            choice=self._choice,
            pool=pool,
            batches=config.batches(),
            columns=columns,
            pieces=pieces,
            prompt_width=config.prompt_width,
            steps=config.dispatch_steps,
            context=self.context,
            dtype=cache_dtype(target),
        )
        self._correction = None
        if config.correct_costs and step.mode == "compact" and step.threshold is None:
            self._correction = CostCorrection(
                lambda: self._programs.costs,
                lambda batch: stepping(step, batch).buckets,
                self._programs.reprice,
            )
        self._metrics = self._new_metrics(before=None)
        self._host = HostTime()
        self._flights: deque[Flight] = deque()
        self._live: dict[int, Sequence] = {}
        self._unclaimed: dict[int, Completion] = {}
        self._arrivals = 0
        self._told: set[str] = set()
        self._stepping = False
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a request waits, runs, or has an answer that `step` has not returned."""
        return bool(self._live or self._flights or self._unclaimed)

    @property
    def free_pages(self) -> int:
        """Pages that no request uses; all of them when the engine is not busy."""
        return self._scheduler.store.free

    @property
    def preemptions(self) -> int:
        """How often a request lost its pages to an older one and had to be computed again."""
        return self._scheduler.preemptions

    @property
    def reused_rows(self) -> int:
        """Rows found in pages of earlier texts instead of computed."""
        return self._scheduler.reused_rows

    def figures(self) -> list[Figure]:
        """What has been measured since the start, or since `reset_metrics` (docs/metrics.md)."""
        return self._metrics.figures()

    def reset_metrics(self) -> None:
        """Measure from here on, as after a warm-up."""
        self._metrics = self._new_metrics(before=self._metrics if self._flights else None)

    def tokens(self, index: int) -> tuple[int, ...]:
        """The answer of a waiting or running request as far as it has been read.

        Raises:
            KeyError: no request of this number is waiting or running.
        """
        return tuple(self._find(index).tokens)

    def warmup(
        self,
        *params: SamplingParams,
        progress: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Compile every tier for requests like these; later ones of the same kind trace nothing.

        Programs differ by whether any request samples, whether any uses top-k or top-p, and how
        many logprobs are asked for; a batch runs in the leanest warmed-up one that serves it. No
        argument means greedy. Call it once a kind.

        Args:
            params: requests that one batch may hold together.
            progress: show a bar.
            cache_dir: folder that keeps compiled programs between processes. JAX has one such
                folder a process: one that is set already stays.
        """
        if cache_dir is not None and jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_dir))
        self._check_usable()
        self._check_between_steps()
        with self._vital(KeyboardInterrupt):
            self._programs.warm_up(params or (SamplingParams(),), progress)

    def add(self, request: Request, *, on_text: Callable[[str], None] | None = None) -> int:
        """Let a request join as soon as there is room; the number that names it from now on.

        Args:
            on_text: called with pieces of the answer's text as they become certain; it may
                `add` and `abort`. What it raises comes out of `step` when all answers are up to
                date, and the request goes on; answers that ended then come with the next `step`.

        Raises:
            ValueError: a request that cannot be answered.
            RuntimeError: the engine has failed in an earlier step.
        """
        self._check_usable()
        index = self._arrivals
        job = make_job(
            index,
            request,
            self.target,
            self.step_config,
            context=self.context,
            allow_biased=self.config.allow_biased,
        )
        if on_text is not None:
            if self.target.text is None:
                raise ValueError(f"on_text needs a tokenizer; target {self.target.name} has none")
            job.stream = StopAwareStream(on_text, self.target.text.stream(), job.params.stop)
        if isinstance(self._calibration, Calibration) and self.step_config.adaptive:
            self._tell(self._calibration.distant(request.params.temperature))
        self._arrivals += 1
        self._live[index] = Sequence(job, self.context, arrived=self._metrics.clock())
        self._scheduler.add(self._live[index])
        return index

    def abort(self, index: int) -> Completion:
        """End a request now; what it has answered so far, with ``finish_reason`` "abort".

        Raises:
            KeyError: no request of this number is waiting or running.
        """
        sequence = self._find(index)
        tokens, text = sequence.tokens, self.target.text
        return self._end(sequence, (tokens, None if text is None else text.decode(tokens), "abort"))

    def step(self) -> dict[int, Completion]:
        """Dispatch a step, or several, and read the ones before; the answers that ended there.

        An error on the device, out of memory for one, comes out of here. What requests had there is
        lost with it, so nothing but `abort` and `figures` works afterwards. Ctrl-C while a
        dispatch is waited for loses nothing.

        Raises:
            RuntimeError: an earlier step has failed, or one is running: this was called from an
                ``on_text`` callback.
        """
        self._check_usable()
        self._check_between_steps()
        self._stepping = True
        try:
            failures = self._advance()
        finally:
            self._stepping = False
        if failures:
            raise failures[0]
        ended, self._unclaimed = self._unclaimed, {}
        return ended

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Answer these requests, in order; others that were added go on beside them.

        Answers of the others come with the next `step`; so do these if a callback of another
        request raises.

        Raises:
            ValueError: a request that cannot be answered; none of them has been started.
            RuntimeError: as `step`; none of them has been started.
        """
        self._check_usable()
        self._check_between_steps()
        wanted = list(requests)
        mine: list[int] = []
        try:
            for request in wanted:
                mine.append(self.add(request))
        except ValueError:
            for index in mine:
                self.abort(index)
            raise
        found: dict[int, Completion] = {}
        try:
            while any(index in self._live for index in mine):
                found |= self.step()
        finally:
            self._unclaimed |= found
        return [self._unclaimed.pop(index) for index in mine]

    def _advance(self) -> list[BaseException]:
        """A step; what callbacks raised."""
        clock = self._metrics.clock
        with self._vital():
            plan = self._scheduler.plan()
            if plan is not None:
                sent = clock()
                self._host.dispatched(sent, plan.steps)
                corrected = self._correction is not None
                flight = self._programs.dispatch(plan, self._host.step if corrected else 0.0)
                flight.sent = sent
                for sequence in (*plan.starting, *(piece.sequence for piece in plan.pieces)):
                    self._metrics.joined(sequence, sent)
                self._flights.append(flight)
            else:
                self._host.idle()
        if plan is not None and not self.config.overlap:
            with self._vital(KeyboardInterrupt):
                self._wait(self._flights[-1])
        failures: list[BaseException] = []
        # Without a new dispatch the oldest one has to be read, or nothing would ever change.
        while not failures and len(self._flights) > (plan is not None):
            with self._vital(KeyboardInterrupt):
                self._wait(self._flights[0])
                report = self._flights[0].read()
            with self._vital():
                failures = self._settle(self._flights.popleft(), report)
            if plan is None:
                break
        return failures

    def _wait(self, flight: Flight) -> None:
        """Return when it has ended."""
        clock = self._metrics.clock
        begin = clock()
        flight.wait(clock)
        self._host.waited(clock() - begin)

    def _settle(self, flight: Flight, report: Report) -> list[BaseException]:
        """Take over what a dispatch did to requests that still want it; what callbacks raised."""
        failures: list[BaseException] = []
        roster, outcome = self._scheduler.roster, report.outcome
        here = roster.here(flight.slots, flight.requests)
        slots, lanes, requests = flight.slots[here], flight.lanes[here], flight.requests[here]
        rows = np.zeros(flight.batch, np.int64)
        rows[lanes] = roster.rows[slots]
        expected = self._metrics.read(flight, report, rows)

        begun = roster.steps[slots] > 0
        brought = (outcome.tokens, outcome.window, outcome.accepted, outcome.count)
        roster.extend(slots, lanes, *map(np.asarray, brought))
        roster.in_flight[slots] -= flight.plan.steps
        if expected is not None:
            roster.expect(slots, expected[lanes])
        self._scheduler.remember(slots)
        finish = np.asarray(report.finish)[-1, lanes]
        changed = np.flatnonzero(~begun | (finish != RUNNING) | roster.watched[slots]).tolist()
        shown: list[tuple[Sequence, Completion | None]] = []
        for index in changed:
            sequence = roster.sequences[slots[index]]
            assert sequence is not None, "it had not left its slot"
            if sequence.first_token is None and sequence.steps:
                sequence.first_token = self._metrics.clock()
            if outcome.logprobs is not None:
                absorb_logprobs(sequence, outcome, int(lanes[index]))
            end = int(finish[index])
            found = ending(sequence, self.target.text, None if end == RUNNING else FINISH[end])
            completion = None
            if found is not None:
                completion = self._unclaimed[sequence.arrival] = self._end(sequence, found)
            shown.append((sequence, completion))
        # Callbacks come when everyone is up to date: one may abort another.
        for sequence, completion in shown:
            if completion is None and sequence.stage is Stage.DONE:
                continue
            try:
                show(sequence, completion)
            except BaseException as failure:  # which must not cost others their tokens
                failures.append(failure)
        if self._choice is not None:
            going = roster.here(slots, requests) & (roster.pages[slots] > 0)
            slots, lanes = slots[going], lanes[going]
            room = roster.room(slots), roster.rows[slots]
            self._choice.learn(slots, lanes, report, *room)
        return failures

    @contextlib.contextmanager
    def _vital(self, *harmless: type[BaseException]) -> Iterator[None]:
        """After an error in here, other than ``harmless``, host and device no longer agree."""
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"this engine has failed in an earlier step with {type(self._failure).__name__}: "
                f"{self._failure}; what its requests had on the device is lost: make a new one"
            ) from self._failure

    def _check_between_steps(self) -> None:
        if self._stepping:
            raise RuntimeError(
                "a step is running: on_text callbacks may add and abort requests, but step or "
                "generate only after they have returned"
            )

    def _find(self, index: int) -> Sequence:
        if index not in self._live:
            raise KeyError(f"request {index} is not waiting or running")
        return self._live[index]

    def _end(self, sequence: Sequence, found: Ending) -> Completion:
        service = self._metrics.ended(sequence, found[2])
        completion = complete(sequence, found, service)
        self._scheduler.leave(sequence)
        sequence.stage = Stage.DONE
        del self._live[sequence.arrival]
        return completion

    def _new_metrics(self, before: Metrics | None) -> Metrics:
        return Metrics(
            self.step_config,
            self._programs.stepping,
            lambda: self._programs.costs,
            self._scheduler,
            self._correction,
            before=before,
        )

    def _tell(self, message: str | None) -> None:
        """Warn once."""
        if message and message not in self._told:
            self._told.add(message)
            logger.warning(message)
