"""Confidence records of a session's answers (``calibration.records``)."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from dspark_jax.calibration.records import AnswerRecord, Source, prompt_key
from dspark_jax.decode.request import Completion, SamplingParams
from dspark_jax.decode.session import Generator


def record_source(
    session: Generator, params: SamplingParams, template_sha256: str | None
) -> Source:
    """Where answers of ``session`` to requests with ``params`` come from.

    Raises:
        ValueError: a session that decodes without a drafter.
    """
    drafter, calibration = session.drafter, session.calibration
    if drafter is None:
        raise ValueError("a session without a drafter has no confidences to record")
    applied = None
    if calibration is not None:
        applied = calibration.nearest(params.temperature).temperatures
    return Source(
        target=session.target.name,
        drafter=drafter.name,
        drafter_sha256=weights_digest(drafter.weights),
        block_size=drafter.config.block_size,
        drafted=session.config.depth,
        mode=session.config.mode,
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        template_sha256=template_sha256,
        calibration=applied,
    )


def answer_record(completion: Completion, prompt_ids: tuple[int, ...]) -> AnswerRecord:
    """The steps of an answer with what is known of each.

    A draft behind an accepted stop has no label, and neither has one that was not verified: the
    window ends where the length limit or the budget does.

    Args:
        completion: an answer of a session that records confidences.
        prompt_ids: what names the prompt; the first turn's ids in a conversation of several.

    Raises:
        ValueError: a session that does not record.
    """
    if completion.confidence_logits is None:
        raise ValueError("the answer has no confidences: record them with record_confidences")
    verified = list(completion.windows)
    if completion.finish_reason == "stop" and completion.commits:
        last = completion.commits[-1]
        if last <= completion.accepted[-1]:
            verified[-1] = min(verified[-1], last)
    accepted = [min(pair) for pair in zip(completion.accepted, verified, strict=True)]
    return AnswerRecord(
        prompt=prompt_key(prompt_ids),
        logits=completion.confidence_logits,
        accepted=tuple(accepted),
        verified=tuple(verified),
    )


def weights_digest(weights: object) -> str:
    """SHA-256 of all arrays of a pytree, in order."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        values = np.asarray(jax.device_get(leaf))
        found.update(f"{values.dtype} {values.shape}".encode())
        found.update(values.tobytes())
    return found.hexdigest()
