"""From the outcomes of steps to answers: growing texts, stop strings, completions. Host only."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_jax.decode import state as states
from dspark_jax.decode.request import Completion, FinishReason, TokenLogprob
from dspark_jax.decode.run import FINISH, cut_commits
from dspark_jax.decode.stops import find_stop
from dspark_jax.engine.lanes import Report
from dspark_jax.engine.sequence import Sequence
from dspark_jax.text.text import Text


class Brought:
    """What a dispatch brought, one lane after another.

    Lists, flat and with offsets: arrays are slow to ask for one number, and nested lists slow to
    make of hundreds of requests.
    """

    def __init__(self, report: Report) -> None:
        outcome = report.outcome

        def by_lane(values: Any) -> np.ndarray:
            return np.swapaxes(np.asarray(values), 0, 1)

        count = by_lane(outcome.count)
        # a lane joins after the step that reads its prompt, and leaves where it ends
        taken = count > 0
        emitted = np.arange(outcome.tokens.shape[-1]) < count[..., None]
        self.commits = count[taken].tolist()
        self.windows = by_lane(outcome.window)[taken].tolist()
        self.accepted = by_lane(outcome.accepted)[taken].tolist()
        self.tokens = by_lane(outcome.tokens)[emitted].tolist()
        self.steps_before = _offsets(taken.sum(axis=1))
        self.tokens_before = _offsets(count.sum(axis=1))
        self.finish = np.asarray(report.finish)[-1].tolist()
        self.logprobs = outcome.logprobs
        self.taken = taken


def _offsets(counts: np.ndarray) -> list[int]:
    return np.concatenate([[0], np.cumsum(counts)]).tolist()


def absorb(sequence: Sequence, brought: Brought, lane: int) -> FinishReason | None:
    """Take over what one lane of a dispatch brought; why the request ended, if it did."""
    begin, end = brought.steps_before[lane : lane + 2]
    first, last = brought.tokens_before[lane : lane + 2]
    commits = brought.commits[begin:end]
    sequence.commits += commits
    sequence.windows += brought.windows[begin:end]
    sequence.accepted += brought.accepted[begin:end]
    sequence.tokens += brought.tokens[first:last]
    if sequence.job.params.logprobs is not None and brought.logprobs is not None:
        steps = np.flatnonzero(brought.taken[lane]).tolist()
        _absorb_logprobs(sequence, brought.logprobs, lane, dict(zip(steps, commits, strict=True)))
    finish = brought.finish[lane]
    return None if finish == states.RUNNING else FINISH[finish]


def _absorb_logprobs(sequence: Sequence, logprobs: Any, lane: int, commits: dict[int, int]) -> None:
    wanted = sequence.job.params.logprobs
    for step, count in commits.items():
        parts = (logprobs.chosen, logprobs.top_ids, logprobs.top_values)
        chosen, ids, values = (part[step, lane, :count].tolist() for part in parts)
        for token_id, own, *top in zip(
            sequence.tokens[len(sequence.logprobs) :], chosen, ids, values, strict=False
        ):
            best = tuple(zip(*(one[:wanted] for one in top), strict=True))
            sequence.logprobs.append(TokenLogprob(token_id, own, best))


def answer(sequence: Sequence, text: Text | None, reason: FinishReason | None) -> Completion | None:
    """The answer, if it has ended by ``reason`` or by a stop string."""
    job, tokens = sequence.job, sequence.tokens
    cut = None
    if text is not None and job.params.stop:
        shown = tokens[:-1] if reason == "stop" else tokens
        cut = find_stop(text.decode, shown, job.params.stop)
    if cut is not None:
        count, before = cut
        return complete(sequence, tokens[:count], before, "stop")
    if reason is None:
        return None
    shown = tokens[:-1] if reason == "stop" else tokens
    return complete(sequence, tokens, None if text is None else text.decode(shown), reason)


def show(sequence: Sequence, completion: Completion | None) -> None:
    """Stream what is new in a growing text, or the rest of a complete one."""
    stream = sequence.job.stream
    if stream is None:
        return
    if completion is None:
        stream.update(sequence.tokens)
    elif completion.text is not None:
        stream.finish(completion.text)


def complete(
    sequence: Sequence, tokens: list[int], text: str | None, reason: FinishReason
) -> Completion:
    """The answer of ``tokens``, the first ones of the sequence's."""
    commits = sequence.commits
    if len(tokens) < len(sequence.tokens):
        commits = cut_commits(commits, len(tokens))
    logprobs = None
    if sequence.job.params.logprobs is not None:
        logprobs = tuple(sequence.logprobs[: len(tokens)])
    return Completion(
        prompt_ids=sequence.job.prompt_ids,
        token_ids=tuple(tokens),
        text=text,
        finish_reason=reason,
        windows=tuple(sequence.windows[: len(commits)]),
        accepted=tuple(sequence.accepted[: len(commits)]),
        commits=tuple(commits),
        logprobs=logprobs,
    )
