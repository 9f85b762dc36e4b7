"""`dspark train`: train a drafter as a TOML config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def train(config: Annotated[Path, tyro.conf.Positional], resume: bool = False) -> int:
    """Train a drafter against a frozen target.

    Args:
        config: TOML file of the run; see ``configs/``.
        resume: continue the run in its output folder from the newest checkpoint.
    """
    # JAX and the training packages load only when a run begins.
    import jax
    import jax.numpy as jnp

    from dspark_jax.checkpoints.resolve import load_target
    from train.config import TrainConfig, read_config
    from train.stopping import Stop
    from train.trainer import DRAFTER, run_training

    settings = read_config(config, TrainConfig)
    if settings.mesh.distributed:
        jax.distributed.initialize()
    dtype = jnp.dtype(settings.target.dtype)
    # A cache stands in for the layers of a target that would not fit beside the drafter.
    target = load_target(settings.target.name, dtype, layers=settings.data.cache is None)
    stop = Stop()
    if not run_training(settings, target, resume=resume, stop=stop):
        print(f"stopped after saving; continue with: dspark train {config} --resume")
        return stop.code
    print(f"drafter written to {Path(settings.training.output) / DRAFTER}")
    return 0
