"""The settings that a bench compares, and the check that all of them can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.job import make_job
from dspark_jax.decode.request import Request
from dspark_jax.decode.setup import context_limit, resolve_calibration, tables_for
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.served import served_step

FIXED = (1, 2, 3, 5, 7)
ADAPTIVE = ("compact", "cap-accept")


def allowed_arms(drafter: LoadedDrafter) -> tuple[str, ...]:
    """Arms of this drafter, in order of running; fixed k of the whole block is "static"."""
    fixed = tuple(f"k={k}" for k in FIXED if k < drafter.config.block_size)
    adaptive = ADAPTIVE if drafter.config.enable_confidence_head else ()
    return ("off", *fixed, "static", *adaptive)


def chosen_arms(
    asked: Sequence[str], drafter: LoadedDrafter, cost_table: object | None
) -> tuple[str, ...]:
    """The arms to run: those asked for, or all that the drafter allows.

    Raises:
        ValueError: an arm that is unknown, twice there, or beyond the drafter; an adaptive one
            without a cost table.
    """
    allowed = allowed_arms(drafter)
    arms = tuple(asked) or allowed
    for arm in arms:
        if arm not in allowed:
            raise ValueError(
                f"arm is {arm!r}; drafter {drafter.name} of block size "
                f"{drafter.config.block_size} allows {', '.join(allowed)}"
            )
    check_each_once(arms)
    check_priced(arms, cost_table)
    return arms


def check_each_once(arms: Sequence[str]) -> None:
    """Refuse an arm that is there twice.

    Raises:
        ValueError: it is.
    """
    if len(set(arms)) < len(arms):
        raise ValueError(f"arms are {', '.join(arms)}; wanted each once")


def check_priced(arms: Sequence[str], cost_table: object | None) -> None:
    """Refuse an adaptive arm without a cost table.

    Raises:
        ValueError: there is one.
    """
    adaptive = [arm for arm in arms if arm in ADAPTIVE]
    if adaptive and cost_table is None:
        raise ValueError(
            f"arm {adaptive[0]} chooses windows by measured costs and no --cost-table is given: "
            "write one with dspark profile, or name other arms with --arms"
        )


def check_used(arms: Sequence[str], **given: bool) -> None:
    """Refuse flags that are given and that none of ``arms`` looks at.

    Raises:
        ValueError: the first flag of the adaptive arms, none of which is to run.
    """
    for name, is_given in given.items():
        if is_given and not any(arm in ADAPTIVE for arm in arms):
            raise ValueError(
                f"--{name.replace('_', '-')} is given and no arm of {', '.join(arms)} looks at "
                f"it; wanted an arm of {', '.join(ADAPTIVE)}, or no --{name.replace('_', '-')}"
            )


def arm_config(base: EngineConfig, arm: str) -> EngineConfig:
    """The engine of an arm; ``base`` holds what all share, cost table included."""
    if arm in ADAPTIVE:
        return dataclasses.replace(base, mode=arm)
    plain = dataclasses.replace(base, cost_table=None, calibration=None, bound_blocks=False)
    if arm == "off":
        return dataclasses.replace(plain, mode="off", k=None)
    k = None if arm == "static" else int(arm.removeprefix("k="))
    return dataclasses.replace(plain, mode="static", k=k)


def check_arm(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    config: EngineConfig,
    requests: Sequence[Request],
) -> None:
    """Refuse what an engine would refuse, or what it could not answer; compiles nothing.

    Raises:
        ValueError: parts that do not fit together, or a request that cannot be answered.
        NotImplementedError: a target or drafter without paged caches.
    """
    step = served_step(target, drafter, config)
    used = drafter if step.drafts else None
    context = context_limit(target.config, config.max_context)
    config.pool(context)
    config.columns(context)
    config.pieces(step.width)
    tables_for(
        target,
        used,
        config.stepping(step, config.max_requests),
        config.cost_table,
        resolve_calibration(config.calibration, used),
        batch=config.max_requests,
    )
    for index, request in enumerate(requests):
        make_job(index, request, target, step, context=context, allow_biased=False)
