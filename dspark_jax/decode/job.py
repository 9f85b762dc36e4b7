"""A request that has been checked against a session and encoded."""

from __future__ import annotations

import dataclasses
import secrets

import numpy as np

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.request import MAX_STOP_IDS, Request, SamplingParams
from dspark_jax.decode.slots import Admission
from dspark_jax.decode.stops import StopAwareStream

INT32_MAX = 2**31 - 1
"""Limits on the device are int32; no vocabulary and no context is larger than this."""


@dataclasses.dataclass
class Job:
    """A request inside a session; ``stream`` is set when its text is shown as it grows."""

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    stream: StopAwareStream | None = None

    def admission(self, slot: int) -> Admission:
        """The device's view of the request."""
        return Admission(
            slot=slot,
            prompt_ids=self.prompt_ids,
            temperature=self.params.temperature,
            top_k=min(self.params.top_k, INT32_MAX),
            top_p=self.params.top_p,
            seed=self.seed,
            max_new_tokens=min(self.params.max_new_tokens, INT32_MAX),
            stop_ids=self.stop_ids,
        )


def make_job(
    index: int,
    request: Request,
    target: LoadedTarget,
    config: StepConfig,
    *,
    context: int,
    allow_biased: bool,
) -> Job:
    """Check a request and encode its prompt.

    Args:
        index: names the request in errors.
        context: most tokens of prompt and answer together.
        allow_biased: consent to policy "fresh" at temperatures above 0.

    Raises:
        ValueError: a request that cannot be answered.
    """
    params, text = request.params, target.text
    where = f"request {index}"
    if isinstance(request.prompt, str):
        if text is None:
            raise ValueError(
                f"{where} has a text prompt, but target {target.name} has no tokenizer: "
                "give token ids"
            )
        prompt_ids = tuple(text.encode(request.prompt))
    else:
        prompt_ids = tuple(request.prompt)
    if not prompt_ids:
        raise ValueError(f"{where} has an empty prompt; wanted at least one token")
    vocab_size = target.config.vocab_size
    stop_ids = tuple(dict.fromkeys((*target.stop_token_ids, *params.stop_token_ids)))
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
    if len(prompt_ids) >= context:
        raise ValueError(
            f"{where} has a prompt of {len(prompt_ids)} tokens; a context of {context} "
            f"holds at most {context - 1} and an answer"
        )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(
            f"{where}: logprobs is {params.logprobs}, the vocabulary has {vocab_size} tokens"
        )
    if params.stop and text is None:
        raise ValueError(
            f"{where} has stop strings {params.stop}, but target {target.name} has no "
            "tokenizer: use stop_token_ids"
        )
    fresh = config.adaptive and config.policy == "fresh" and config.threshold is None
    if fresh and params.temperature > 0 and not allow_biased:
        raise ValueError(
            f'{where}: policy "fresh" at temperature {params.temperature} changes the '
            "distribution of the output; allow it with allow_biased, or use policy "
            '"lagged" or "causal"'
        )
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return Job(index, tuple(map(int, prompt_ids)), params, seed, stop_ids)
