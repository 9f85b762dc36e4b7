"""The step that an engine serves, and whether target and drafter fit it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.setup import check_pair, default_mode, depth_caps
from dspark_jax.engine.config import EngineConfig


def served_step(
    target: LoadedTarget, drafter: LoadedDrafter | None, config: EngineConfig
) -> StepConfig:
    """The step that an engine of this configuration takes.

    Raises:
        ValueError: parts that do not fit together.
        NotImplementedError: a target or drafter without paged caches.
    """
    mode = config.mode or default_mode(drafter)
    if mode == "off":
        drafter = None
    if drafter is not None:
        check_pair(target, drafter)
    _check_paged(target, drafter)
    step = StepConfig(
        target=target.config,
        drafter=None if drafter is None else drafter.config,
        mode=mode,
        k=config.k,
        threshold=config.threshold,
        policy=config.policy,
        lag=config.lag,
        bound_blocks=config.bound_blocks,
    )
    if not step.adaptive:
        return step
    return dataclasses.replace(step, walk_caps=depth_caps(None, step.depth, config.priced))


def reuses_prefixes(
    target: LoadedTarget, drafter: LoadedDrafter | None, config: EngineConfig
) -> bool:
    """Whether full pages are kept for later requests.

    Raises:
        ValueError: they are to be, and do not hold all that a part keeps of a text.
    """
    for part, loaded in (("target", target), ("drafter", drafter)):
        family = None if loaded is None else loaded.config.family
        beside = getattr(family, "BESIDE_PAGES", None)
        if loaded is None or beside is None:
            continue
        if config.prefix_reuse:
            raise ValueError(
                f"prefix_reuse is True; wanted None or False: {part} {loaded.name} keeps {beside} "
                "beside its pages, which another request could not take over"
            )
        return False
    return config.prefix_reuse is not False


def _check_paged(target: LoadedTarget, drafter: LoadedDrafter | None) -> None:
    parts: list[tuple[str, Any, str]] = [("target", target, "init_pages")]
    if drafter is not None:
        parts.append(("drafter", drafter, "init_context_pages"))
    for part, loaded, wanted in parts:
        family = loaded.config.family
        if not hasattr(family, wanted):
            raise NotImplementedError(
                f"{part} {loaded.name} of family {family.__name__} has no paged cache "
                f"({wanted}): use Generator"
            )
