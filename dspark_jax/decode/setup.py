"""What a session fixes before its first step: shapes, mode, tables; checked before compiling."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.calibration.file import Calibration, load_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import Mode, StepConfig
from dspark_jax.decode.request import SamplingParams
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig, check_fits_v4
from dspark_jax.drafter.validate import check_fits
from dspark_jax.schedule.cost import (
    CostTables,
    TierCosts,
    beside_prompts,
    load_costs,
    no_costs,
    read_tiers,
    with_calibration,
)

DEFAULT_CONTEXT = 2048


Needs = tuple[bool, bool, int]
"""Whether to sample, whether to filter by top-k or top-p, and how many logprobs; -1 for none."""


def default_mode(drafter: LoadedDrafter | None) -> Mode:
    """The most that this drafter, or none, can do."""
    if drafter is None:
        return "off"
    return "compact" if drafter.config.enable_confidence_head else "static"


def context_limit(config: Any, max_context: int | None) -> int:
    """Tokens of prompt and answer together, within what the target was made for."""
    limit = getattr(config, "max_position_embeddings", None)
    if max_context is None:
        return DEFAULT_CONTEXT if limit is None else min(DEFAULT_CONTEXT, limit)
    if max_context < 2:
        raise ValueError(f"max_context is {max_context}; wanted 2 or more")
    if limit is not None and max_context > limit:
        raise ValueError(f"max_context is {max_context}, but the target was made for {limit}")
    return max_context


def check_pair(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """Raise for a drafter of another target."""
    if isinstance(drafter.config, DrafterConfig):
        check_fits(drafter.config, target.config, {"stop": target.stop_token_ids})
    elif isinstance(drafter.config, DeepseekV4DrafterConfig):
        check_fits_v4(drafter.config, target.config, target.stop_token_ids)
    elif drafter.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the drafter's vocab_size is {drafter.config.vocab_size}, "
            f"the target has {target.config.vocab_size}"
        )


def compact_buckets(buckets: tuple[int, ...] | None, batch: int, width: int) -> tuple[int, ...]:
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


def depth_caps(caps: tuple[int, ...] | None, depth: int, priced: bool) -> tuple[int, ...]:
    """Depths the sequential head may stop at; without costs it never stops early."""
    if caps is not None:
        increasing = all(a < b for a, b in itertools.pairwise(caps))
        if not caps or caps[-1] != depth or caps[0] < 1 or not increasing:
            raise ValueError(
                f"walk_caps are {caps}; wanted increasing depths of 1 or more that end at {depth}"
            )
        return caps
    return (*(cap for cap in (1, 2, 3, 5) if cap < depth), depth) if priced else (depth,)


def cache_dtype(target: LoadedTarget) -> Any:
    """The dtype of a target's weights, and so of its caches."""
    return target.config.family.input_embedding(target.weights).dtype


def resolve_calibration(
    calibration: Calibration | str | Path | None, drafter: LoadedDrafter | None
) -> Calibration | str | Path | None:
    """Load STS temperatures for this drafter; without one nothing is read."""
    if drafter is None or calibration is None or isinstance(calibration, Calibration):
        return calibration
    return load_calibration(calibration, block_size=drafter.config.block_size)


def tables_for(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    config: StepConfig,
    cost_table: CostTables | str | Path | None,
    calibration: Calibration | str | Path | None,
    *,
    batch: int,
    prompt_rows: int = 0,
) -> CostTables:
    """Costs and temperatures for the drafts that ``batch`` requests walk.

    Args:
        prompt_rows: rows of prompts that every verify of this batch carries besides.

    Raises:
        ValueError: a table or calibration of something else, or one that nothing would look at.
    """
    _refuse_idle(config, drafter, cost_table, calibration)
    if drafter is None:
        return no_costs(batch, 0)
    block_size = drafter.config.block_size
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
        tables = beside_prompts(tables, prompt_rows)
    else:
        tables = load_costs(
            cost_table,
            slots=batch,
            block_size=block_size,
            buckets=config.buckets or None,
            prompt_rows=prompt_rows,
            **_measured_for(target),
        )
    loaded = resolve_calibration(calibration, drafter)
    if isinstance(loaded, Calibration):
        tables = with_calibration(tables, loaded)
    depth = config.depth
    return dataclasses.replace(
        tables, temperatures=tables.temperatures[:, :depth], walk=tables.walk[:depth]
    )


def _refuse_idle(
    config: StepConfig,
    drafter: LoadedDrafter | None,
    cost_table: CostTables | str | Path | None,
    calibration: Calibration | str | Path | None,
) -> None:
    """Refuse measurements that decide nothing here."""
    if cost_table is not None and not (config.adaptive and config.threshold is None):
        place = f"mode is {config.mode!r}"
        if config.threshold is not None:
            place = f"threshold is {config.threshold}"
        raise ValueError(
            f"a cost table is given and {place}, where no costs are compared; wanted mode "
            '"compact" or "cap-accept" and no threshold, or no cost table'
        )
    if calibration is None:
        return
    if drafter is None:
        raise ValueError(
            'a calibration is given and mode is "off", where no confidence is looked at; wanted a '
            "drafter and a mode that drafts, or no calibration"
        )
    if not drafter.config.enable_confidence_head:
        raise ValueError(
            f"a calibration is given and drafter {drafter.name} has no confidence head to "
            "calibrate; wanted no calibration"
        )


def tiers_for(
    target: LoadedTarget, drafter: LoadedDrafter, cost_table: str | Path, *, batch: int
) -> tuple[TierCosts, ...]:
    """The tiers of a cost table of this pair; ``batch`` as ``slots`` of `read_tiers`.

    Raises:
        ValueError: a table of something else.
    """
    block_size = drafter.config.block_size
    return read_tiers(cost_table, slots=batch, block_size=block_size, **_measured_for(target))


def _measured_for(target: LoadedTarget) -> dict[str, str]:
    """What a cost table must have been measured for."""
    return {
        "device": jax.devices()[0].device_kind,
        "model": target.name,
        "dtype": np.dtype(cache_dtype(target)).name,
    }


def variant(config: StepConfig, params: Sequence[SamplingParams]) -> StepConfig:
    """The step that serves these requests and does nothing they do not need."""
    return serving(config, needs_of(params))


def needs_of(params: Iterable[SamplingParams]) -> Needs:
    """What a step must be able to do for all of these requests."""

    def own(one: SamplingParams) -> Needs:
        sampled = one.temperature > 0
        filtered = sampled and (one.top_k > 0 or one.top_p < 1)
        return sampled, filtered, -1 if one.logprobs is None else one.logprobs

    sampled, filtered, logprobs = zip((False, False, -1), *map(own, params), strict=True)
    return any(sampled), any(filtered), max(logprobs)


def serving(config: StepConfig, needs: Needs) -> StepConfig:
    """The step that can do this and no more."""
    sampled, filtered, logprobs = needs
    logprobs = None if logprobs < 0 else logprobs
    return dataclasses.replace(config, sampled=sampled, filtered=filtered, logprobs=logprobs)
