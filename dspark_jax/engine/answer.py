"""From the outcomes of steps to answers: stop strings, streams, completions. Host only."""

from __future__ import annotations

import numpy as np

from dspark_jax.decode.request import Completion, FinishReason, Service, TokenLogprob
from dspark_jax.decode.run import cut_commits
from dspark_jax.decode.step import Outcome
from dspark_jax.decode.stops import find_stop
from dspark_jax.engine.sequence import Sequence
from dspark_jax.text.text import Text

Ending = tuple[list[int], str | None, FinishReason]
"""Tokens of an answer, its text, and why it ended."""


def absorb_logprobs(sequence: Sequence, outcome: Outcome, lane: int) -> None:
    """Take over those of one lane of a dispatch's outcomes, if they were asked for."""
    wanted, logprobs = sequence.job.params.logprobs, outcome.logprobs
    if wanted is None or logprobs is None:
        return
    count = np.asarray(outcome.count)[:, lane]
    for step in np.flatnonzero(count):
        parts = (logprobs.chosen, logprobs.top_ids, logprobs.top_values)
        chosen, ids, values = (part[step, lane, : count[step]].tolist() for part in parts)
        begin = sequence.prompt_rows + len(sequence.logprobs)
        tokens = sequence.text(begin, begin + len(chosen))
        for token_id, own, *top in zip(tokens, chosen, ids, values, strict=True):
            best = tuple(zip(*(one[:wanted] for one in top), strict=True))
            sequence.logprobs.append(TokenLogprob(token_id, own, best))


def ending(sequence: Sequence, text: Text | None, reason: FinishReason | None) -> Ending | None:
    """The answer, if it has ended by ``reason`` or by a stop string."""
    stops = sequence.job.params.stop if text is not None else ()
    if reason is None and not stops:
        return None
    tokens = sequence.tokens
    shown = tokens[:-1] if reason == "stop" else tokens
    if text is not None and stops:
        cut = find_stop(text.decode, shown, stops)
        if cut is not None:
            count, before = cut
            return tokens[:count], before, "stop"
    if reason is None:
        return None
    return tokens, None if text is None else text.decode(shown), reason


def show(sequence: Sequence, completion: Completion | None) -> None:
    """Stream what is new in a growing text, or the rest of a complete one."""
    stream = sequence.job.stream
    if stream is None:
        return
    if completion is None:
        stream.update(sequence.tokens)
    elif completion.text is not None:
        stream.finish(completion.text)


def complete(sequence: Sequence, ending: Ending, service: Service) -> Completion:
    """The answer, of the sequence's first tokens."""
    tokens, text, reason = ending
    windows, accepted, commits = sequence.records
    if len(tokens) < sum(commits):
        commits = cut_commits(commits, len(tokens))
    logprobs = None
    if sequence.job.params.logprobs is not None:
        logprobs = tuple(sequence.logprobs[: len(tokens)])
    return Completion(
        prompt_ids=sequence.job.prompt_ids,
        token_ids=tuple(tokens),
        text=text,
        finish_reason=reason,
        windows=tuple(windows[: len(commits)]),
        accepted=tuple(accepted[: len(commits)]),
        commits=tuple(commits),
        logprobs=logprobs,
        service=service,
    )
