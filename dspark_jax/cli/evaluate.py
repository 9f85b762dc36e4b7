"""`dspark evaluate`: measure a drafter as a TOML config describes, or compare two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def evaluate(
    config: Annotated[Path | None, tyro.conf.Positional] = None,
    resume: bool = False,
    compare: tuple[Path, Path] | None = None,
) -> int:
    """Measure what a drafter is worth to its target, or compare two such runs.

    Args:
        config: TOML file of the run; see ``configs/``.
        resume: continue the run in its output folder.
        compare: two evaluation.json; refused when they were made under different conditions.
    """
    if (config is None) == (compare is None):
        raise ValueError("give one of CONFIG.toml and --compare A.json B.json")
    if compare is not None and resume:
        raise ValueError("--resume continues the run of CONFIG.toml; --compare runs nothing")
    # JAX and the training packages load only when a job begins.
    from train.comparison import print_comparison

    if config is None:
        assert compare is not None
        print_comparison(*compare)
        return 0
    import jax.numpy as jnp

    from dspark_jax.checkpoints.drafter import load_drafter
    from dspark_jax.checkpoints.resolve import load_target
    from train.config import read_config
    from train.evaluate import run_evaluation
    from train.evaluate_config import EvaluateConfig
    from train.stopping import Stop, Stopped

    settings = read_config(config, EvaluateConfig)
    dtype = jnp.dtype(settings.target.dtype)
    target = load_target(settings.target.name, dtype)
    pair = (target.config, target.weights)
    drafter = load_drafter(settings.drafter.name, pair, dtype, stop_token_ids=target.stop_token_ids)
    try:
        with Stop() as stop:
            run_evaluation(settings, target, drafter, resume=resume, stop=stop)
    except Stopped as stopped:
        print(f"stopped after saving; continue with: dspark evaluate {config} --resume")
        return stopped.code
    print(f"evaluation written to {settings.evaluation.output}")
    return 0
