"""One call of a session: who waits, who decodes in which slot, who is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from dspark_jax.decode import state as states
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.interrupt import Interrupt
from dspark_jax.decode.job import Job
from dspark_jax.decode.request import Completion, FinishReason, TokenLogprob
from dspark_jax.decode.slots import Rows, SlotPrograms, Status
from dspark_jax.decode.stops import find_stop
from dspark_jax.text.text import Text

UNWATCHED = 4
"""How much longer a chunk of steps may be when no text is streamed and no stop string watched."""

FINISH: dict[int, FinishReason] = {
    states.RUNNING: "abort",
    states.STOP: "stop",
    states.LENGTH: "length",
    states.CONTEXT: "context",
}


class Run:
    """The requests of one ``generate`` call, from waiting to answered."""

    def __init__(
        self,
        programs: SlotPrograms,
        config: StepConfig,
        text: Text | None,
        jobs: Sequence[Job],
        *,
        steps: int,
        on_completion: Callable[[int, Completion], None] | None,
    ) -> None:
        """``steps`` are run between two looks of the host."""
        self._programs = programs
        self._config = config
        self._text = text
        self._steps = steps
        self._waiting = deque(jobs)
        self._running: dict[int, Job] = {}
        self._free = list(range(programs.slots))
        self._ended: list[tuple[Job, Rows, Status, int]] = []
        self._done: dict[int, Completion] = {}
        self._on_completion = on_completion
        self._state = programs.start(config)

    def until_done(self, interrupt: Interrupt) -> None:
        """Run chunks of steps until every job is answered or the user has had enough.

        Raises:
            KeyboardInterrupt: a second Ctrl-C, or one that cost the answers on the device.
        """
        try:
            while self._waiting or self._running:
                if interrupt.pending:
                    self._abort()
                    return
                self._fill()
                self._decode()
                # The host writes up what ended before while the device runs the next chunk.
                self._settle()
                self._look()
            self._settle()
        except KeyboardInterrupt:
            # A second Ctrl-C, or one inside a device call that had already taken the state.
            if interrupt.pending or self._state.active.is_deleted():
                raise
            self._abort()

    def completions(self) -> list[Completion]:
        """Answers in the order of the requests."""
        return [self._done[index] for index in sorted(self._done)]

    def _fill(self) -> None:
        count = min(len(self._free), len(self._waiting))
        if not count:
            return
        slots, self._free = self._free[:count], self._free[count:]
        admissions = []
        for slot in slots:
            self._running[slot] = job = self._waiting.popleft()
            admissions.append(job.admission(slot))
        self._state = self._programs.fill(self._state, admissions, config=self._config)

    def _decode(self) -> None:
        """Start a chunk: short while somebody watches, else until enough slots can be refilled."""
        watched = any(job.params.stop or job.stream for job in self._running.values())
        steps = self._steps if watched else UNWATCHED * self._steps
        refill = max(1, self._programs.slots // 8)
        keep = max(0, len(self._running) - refill) if self._waiting else 0
        self._state = self._programs.run(self._state, steps, keep, config=self._config)

    def _look(self) -> None:
        """Free the slots of what ended, and stop what met a stop string."""
        status = self._programs.status(self._state)
        ended = [slot for slot in self._running if not status.active[slot]]
        watched = [
            slot
            for slot, job in self._running.items()
            if status.active[slot] and (job.params.stop or job.stream)
        ]
        rows = self._programs.read(self._state, ended + watched)
        stopped = []
        for slot, row in rows.items():
            job = self._running[slot]
            if not status.active[slot]:
                self._free.append(slot)
                self._ended.append((self._running.pop(slot), row, status, slot))
                continue
            completion = self._answer(job, row, status, slot)
            if completion.finish_reason == "stop":
                stopped.append(slot)
                self._free.append(slot)
                self._finish(self._running.pop(slot), completion)
            elif job.stream is not None:
                job.stream.update(completion.token_ids)
        self._state = self._programs.clear(self._state, stopped)

    def _settle(self) -> None:
        """Write up the answers that ended."""
        while self._ended:
            job, row, status, slot = self._ended.pop(0)
            self._finish(job, self._answer(job, row, status, slot))

    def _abort(self) -> None:
        """Keep what there is. Nothing more is shown or announced: the user asked for quiet."""
        for job, row, ended_status, slot in self._ended:
            self._done[job.index] = self._answer(job, row, ended_status, slot)
        status = self._programs.status(self._state)
        slots = list(self._running)
        for slot, row in self._programs.read(self._state, slots).items():
            job = self._running[slot]
            self._done[job.index] = self._answer(job, row, status, slot)
        while self._waiting:
            job = self._waiting.popleft()
            text = None if self._text is None else ""
            logprobs = None if job.params.logprobs is None else ()
            confidences = () if self._config.record_confidences else None
            self._done[job.index] = Completion(
                job.prompt_ids, (), text, "abort", (), (), (), logprobs, confidences
            )

    def _finish(self, job: Job, completion: Completion) -> None:
        self._done[job.index] = completion
        if job.stream is not None:
            assert completion.text is not None
            job.stream.finish(completion.text)
        if self._on_completion is not None:
            self._on_completion(job.index, completion)

    def _answer(self, job: Job, row: Rows, status: Status, slot: int) -> Completion:
        """The answer so far, cut where a stop string is completed; "abort" means unfinished."""
        emitted, steps = int(status.emitted[slot]), int(status.steps[slot])
        reason = FINISH[int(status.finish[slot])]
        token_ids = row.tokens[:emitted].tolist()
        commits = row.commits[:steps].tolist()
        text = None
        if self._text is not None:
            shown = token_ids[:-1] if reason == "stop" else token_ids
            found = find_stop(self._text.decode, shown, job.params.stop)
            if found is None:
                text = self._text.decode(shown)
            else:
                (emitted, text), reason = found, "stop"
                token_ids = token_ids[:emitted]
                commits = cut_commits(commits, emitted)
        return Completion(
            prompt_ids=job.prompt_ids,
            token_ids=tuple(token_ids),
            text=text,
            finish_reason=reason,
            windows=tuple(row.windows[: len(commits)].tolist()),
            accepted=tuple(row.accepted[: len(commits)].tolist()),
            commits=tuple(commits),
            logprobs=_logprobs(row, token_ids, job.params.logprobs),
            confidence_logits=None
            if row.confidence_log is None
            else tuple(map(tuple, row.confidence_log[: len(commits)].tolist())),
        )


def cut_commits(commits: Sequence[int], tokens: int) -> list[int]:
    """Commits per step of the first ``tokens`` tokens."""
    kept: list[int] = []
    for count in commits:
        if tokens <= 0:
            break
        kept.append(min(count, tokens))
        tokens -= count
    return kept


def _logprobs(
    row: Rows, token_ids: Sequence[int], wanted: int | None
) -> tuple[TokenLogprob, ...] | None:
    if wanted is None or row.logprobs is None:
        return None
    chosen, ids, values = row.logprobs.chosen, row.logprobs.top_ids, row.logprobs.top_values
    return tuple(
        TokenLogprob(
            token_id,
            float(chosen[index]),
            tuple(zip(ids[index, :wanted].tolist(), values[index, :wanted].tolist(), strict=True)),
        )
        for index, token_id in enumerate(token_ids)
    )
