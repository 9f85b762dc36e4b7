"""Figures of one arm under one load, by workload too, and what arms say of each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dspark_jax.bench.load import Load
from dspark_jax.decode.request import Completion


def summarise(load: Load, workloads: Sequence[str], mode: str) -> dict[str, Any]:
    """Throughput, interactivity and lengths.

    Interactivity is the speed that a user sees: tokens of an answer over the seconds since the
    request left the queue, its prompt's prefill included; median and slowest tenth of requests.

    Args:
        load: what came back.
        workloads: of each answer.
        mode: "cap-accept" knows what windows cut.
    """
    answers = load.answers
    tokens = sum(len(one.token_ids) for one in answers)
    speeds = [_speed(one) for one in answers]
    full = load.full_tokens / load.full_seconds if load.full_tokens else None
    by_workload = {
        name: lengths(
            [one for one, own in zip(answers, workloads, strict=True) if own == name], mode
        )
        for name in dict.fromkeys(workloads)
    }
    return {
        "requests": len(answers),
        "seconds": load.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / load.seconds,
        "full_tokens_per_second": full,
        "interactivity": float(np.median(speeds)),
        "interactivity_p10": float(np.percentile(speeds, 10)),
        **lengths(answers, mode),
        "workloads": by_workload,
        "answers": [
            [
                name,
                len(one.prompt_ids),
                len(one.token_ids),
                len(one.commits),
                sum(one.windows),
                sum(one.committed),
                sum(one.cap_trim),
                *_times(one),
            ]
            for one, name in zip(answers, workloads, strict=True)
        ],
    }


ANSWER_COLUMNS = (
    "workload",
    "prompt_tokens",
    "tokens",
    "steps",
    "window_drafts",
    "committed_drafts",
    "trimmed_drafts",
    "queue_seconds",
    "first_token_seconds",
    "seconds",
)
"""Of the rows under ``answers``."""


def lengths(answers: Sequence[Completion], mode: str) -> dict[str, Any]:
    """Tokens a window, rows a window (anchor included), and the ceiling that cap-accept sees."""
    steps = sum(len(one.commits) for one in answers)
    tokens = sum(len(one.token_ids) for one in answers)
    windows = np.concatenate([one.windows for one in answers])
    ceiling = None
    if mode == "cap-accept":
        ceiling = (tokens + sum(sum(one.cap_trim) for one in answers)) / steps
    return {
        "accepted_length": tokens / steps,
        "mean_window": float(windows.mean()) + 1,
        "window_p10": float(np.percentile(windows, 10)) + 1,
        "window_p90": float(np.percentile(windows, 90)) + 1,
        "block_accept_length": ceiling,
    }


def add_ratios(arms: Iterable[dict[str, Any]]) -> None:
    """Throughput over that of "off" and over the best fixed setting, at the same load."""
    measured = [arm for arm in arms if "tokens_per_second" in arm]
    for arm in measured:
        rivals = {
            other["arm"]: other["tokens_per_second"]
            for other in measured
            if other["concurrency"] == arm["concurrency"]
        }
        fixed = [rate for name, rate in rivals.items() if name not in ("compact", "cap-accept")]
        mine, off = arm["tokens_per_second"], rivals.get("off")
        arm["ratio_to_off"] = mine / off if off else None
        arm["ratio_to_best_fixed"] = mine / max(fixed) if fixed else None


def mixed_traffic(arms: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By load and workload: compact's windows, and its accepted length under cap-accept's ceiling.

    The ceiling is what cap-accept, with the same windows, would have committed without them.
    ``full_length`` is what full blocks bring, from arm "static"; None if it did not run.
    """
    by_name = {
        (arm["arm"], arm["concurrency"]): arm["workloads"] for arm in arms if "workloads" in arm
    }
    rows = []
    for (name, concurrency), workloads in by_name.items():
        truth = by_name.get(("cap-accept", concurrency))
        full = by_name.get(("static", concurrency))
        if name != "compact" or truth is None:
            continue
        for workload, found in workloads.items():
            ceiling = truth[workload]["block_accept_length"]
            rows.append(
                {
                    "concurrency": concurrency,
                    "workload": workload,
                    "mean_window": found["mean_window"],
                    "accepted_length": found["accepted_length"],
                    "full_length": full and full[workload]["accepted_length"],
                    "ceiling": ceiling,
                    "utilisation": found["accepted_length"] / ceiling,
                }
            )
    return rows


def verdicts(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By load: what compact reaches of the ceiling over all traffic, and what may be concluded.

    ``windows_ordered``: whether workloads that accept more have windows no shorter, by the
    accepted length of full blocks if arm "static" ran, by the ceiling if not; None for a single
    workload. ``bounds``: by adaptive arm, the bounds that it set on full blocks from within, and
    whether they hold what cap-accept saw (``full_blocks``); only of arms that bound blocks.
    """
    by_name = {(arm["arm"], arm["concurrency"]): arm for arm in arms if "workloads" in arm}
    mixed = mixed_traffic(arms)
    found = []
    for (name, concurrency), truth in by_name.items():
        compact = by_name.get(("compact", concurrency))
        if name != "cap-accept" or compact is None:
            continue
        seen = truth["block_accept_length"]
        rows = [row for row in mixed if row["concurrency"] == concurrency]
        bounds = {}
        for arm in (compact, truth):
            low = arm["metrics"].get("spec_block_accept_length_low")
            high = arm["metrics"].get("spec_block_accept_length_high")
            if low is not None and high is not None:
                held = low <= seen <= high
                bounds[arm["arm"]] = {"low": low, "high": high, "held": held}
        found.append(
            {
                "concurrency": concurrency,
                "utilisation": compact["accepted_length"] / seen,
                "windows_ordered": _ordered(rows) if len(rows) > 1 else None,
                "full_blocks": seen,
                "bounds": bounds,
            }
        )
    return found


def _ordered(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether windows never fall from a workload to one that accepts more."""
    known = all(row["full_length"] is not None for row in rows)
    by_acceptance = sorted(rows, key=lambda row: row["full_length" if known else "ceiling"])
    windows = [row["mean_window"] for row in by_acceptance]
    return windows == sorted(windows)


def _times(answer: Completion) -> tuple[float | None, float | None, float]:
    service = answer.service
    assert service is not None, "answers of an engine say how they were served"
    return service.queue_seconds, service.first_token_seconds, service.seconds


def _speed(answer: Completion) -> float:
    queued, _, seconds = _times(answer)
    return len(answer.token_ids) / (seconds - (queued or 0.0))
