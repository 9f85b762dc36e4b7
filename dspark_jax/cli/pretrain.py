"""`dspark pretrain`: train a small DeepSeek-shaped target as a TOML config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def pretrain(config: Annotated[Path, tyro.conf.Positional], resume: bool = False) -> int:
    """Train a small target of DeepSeek's families on the answers of another model.

    Args:
        config: TOML file of the run; see ``configs/``.
        resume: continue the run in its output folder from the newest checkpoint.
    """
    # JAX and the training packages load only when a run begins.
    import jax
    import jax.numpy as jnp

    from dspark_jax.checkpoints.resolve import load_target
    from train.config import read_config
    from train.pretrain import TARGET, run_pretraining
    from train.pretrain_config import PretrainConfig
    from train.stopping import Stop

    settings = read_config(config, PretrainConfig)
    if settings.mesh.distributed:
        jax.distributed.initialize()
    teacher = load_target(settings.teacher.name, jnp.bfloat16, layers=False)
    stop = Stop()
    if not run_pretraining(settings, teacher, resume=resume, stop=stop):
        print(f"stopped after saving; continue with: dspark pretrain {config} --resume")
        return stop.code
    print(f"target written to {Path(settings.training.output) / TARGET}")
    return 0
