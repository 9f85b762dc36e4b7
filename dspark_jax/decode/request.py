"""What is asked of a session, and what it answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

NOT_YET = frozenset(
    {
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_p",
        "grammar",
        "structured_outputs",
        "response_format",
        "n",
        "best_of",
        "prompt_logprobs",
        "lora",
        "draft_tree",
        "tensor_parallel_size",
    }
)
"""Parameters that other engines have and this one refuses by name."""

MAX_STOP_IDS = 16
"""Stop ids a request may have, the target's own included: the width of a device array."""

MAX_LOGPROBS = 20
"""Alternatives a request may have reported beside each token."""

FinishReason = Literal["stop", "length", "context", "abort"]


def check_whole(name: str, value: Any) -> None:
    """Raise for a count that is no whole number: devices would cut it off in silence.

    Raises:
        ValueError: names the parameter and its value.
    """
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; wanted a whole number")


def refuse(parameters: Mapping[str, Any]) -> None:
    """Raise for parameters that are not supported yet; others are left to Python's own check.

    Raises:
        NotImplementedError: names the first parameter of ``NOT_YET`` and its value.
    """
    for name, value in parameters.items():
        if name in NOT_YET:
            raise NotImplementedError(f"{name} is not supported yet (got {value!r}): leave it out")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: most likely tokens to draw from; 0 is off.
        top_p: probability mass to draw from, after top-k; 1 is off.
        seed: 0..2^32-1; None draws a new one. The same seed gives the same noise.
        max_new_tokens: tokens to emit at most.
        stop_token_ids: ids that end the answer beside the target's own; the id is part of
            ``token_ids`` but not of ``text``.
        stop: strings that end the answer; the token that completes one is the last of
            ``token_ids``, and ``text`` ends before the string.
        logprobs: None, or how many alternatives to report beside each token's logprob.

    Raises:
        ValueError: a value out of range.
        NotImplementedError: a parameter of ``NOT_YET``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __new__(cls, *values: Any, **parameters: Any) -> SamplingParams:
        """Refuse what is not supported before Python complains about an unknown name."""
        refuse(parameters)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, bytes) or not isinstance(value, Iterable):
                raise ValueError(f"{name} is {value!r}; wanted a sequence")
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str):
                raise ValueError(f"stop holds {text!r}; wanted strings")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise ValueError(f"{name} is {value!r}; wanted a number")
        for name in ("top_k", "max_new_tokens"):
            check_whole(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; wanted 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; wanted 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; wanted above 0, at most 1 (off)")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; wanted 0..{2**32 - 1}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; wanted 1 or more")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which every answer contains")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; wanted 0..{MAX_LOGPROBS}, or None")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, as text or as token ids, and how to answer it.

    Text is encoded as it is: no chat template, no special token added.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = SamplingParams()


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-softmax of the raw target logits, before temperature and filters.

    ``top`` holds (token id, logprob) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Service:
    """How an engine served a request.

    Attributes:
        queue_seconds: from arrival to the first step with a part of it; None without one.
        first_token_seconds: from arrival to the moment the first token was read; None likewise.
        seconds: from arrival to the answer.
        preemptions: how often it lost its pages and was computed again.
        reused_rows: rows of its text found in pages of earlier texts.
        expected_accepted: drafts expected to be committed, the survivals of those in its windows;
            None without confidences.
    """

    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float
    preemptions: int
    reused_rows: int
    expected_accepted: float | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        prompt_ids: the prompt as it was read.
        token_ids: the answer, the stop that ended it included.
        text: the answer without its stop; None when the target has no tokenizer.
        finish_reason: "stop" (an id or a string), "length", "context" (full) or "abort".
        windows: drafts verified at each step.
        accepted: drafts that the verified rows accepted at each step. In mode "cap-accept"
            the whole block is verified and this may exceed the window.
        commits: tokens committed at each step, bonus included; they add up to ``token_ids``.
        logprobs: one a token, None unless asked for.
        confidence_logits: of each step's drafts, before calibration; None unless the session
            records them.
        service: how an engine served it; None from a session. No part of equality.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    windows: tuple[int, ...]
    accepted: tuple[int, ...]
    commits: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    confidence_logits: tuple[tuple[float, ...], ...] | None = None
    service: Service | None = dataclasses.field(default=None, compare=False)

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens a step, bonus included; None without a step.

        A stop accepted inside a block counts the drafts up to it and no bonus.
        """
        return len(self.token_ids) / len(self.commits) if self.commits else None

    @property
    def proposed(self) -> tuple[int, ...]:
        """Drafts that counted as proposals at each step: the windows, the last cut at a stop."""
        if self.finish_reason != "stop" or not self.windows:
            return self.windows
        return (*self.windows[:-1], min(self.windows[-1], self.commits[-1]))

    @property
    def committed(self) -> tuple[int, ...]:
        """Drafts committed at each step, those behind an accepted stop left out."""
        steps = zip(self.accepted, self.windows, self.commits, strict=True)
        return tuple(min(step) for step in steps)

    @property
    def cap_trim(self) -> tuple[int, ...]:
        """Drafts at each step that the window cut though verification accepted them.

        Only mode "cap-accept" verifies behind its windows; elsewhere 0.
        """
        steps = zip(self.accepted, self.windows, self.commits, strict=True)
        return tuple(
            max(accepted - window, 0) if count > window else 0 for accepted, window, count in steps
        )

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """Share of the drafts verified at each position, all before them accepted, that were too.

        Conditional acceptance; as long as the longest window, None where none was reached.
        """
        steps = [
            (got if count <= got else window, got)
            for window, got, count in zip(self.windows, self.committed, self.commits, strict=True)
        ]
        shares: list[float | None] = []
        for position in range(1, max(self.windows, default=0) + 1):
            reached = [got >= position for window, got in steps if window >= position <= got + 1]
            shares.append(sum(reached) / len(reached) if reached else None)
        return tuple(shares)
