"""`dspark data`: write training data with the target, as a TOML config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def data(
    config: Annotated[Path, tyro.conf.Positional], resume: bool = False, estimate: bool = False
) -> int:
    """Answer prompts with a target and write tokens and masks to train drafters on.

    Args:
        config: TOML file of the job; see ``configs/``.
        resume: continue the job in its output folder.
        estimate: stop after the estimate of time and disk; what was measured is kept.
    """
    # JAX and the training packages load only when a job begins.
    import jax.numpy as jnp

    from dspark_jax.checkpoints.resolve import load_target
    from train.answers import build_dataset
    from train.cache_features import cache_features, check_features
    from train.config import read_config
    from train.data_config import DataConfig
    from train.stopping import Stop, Stopped

    settings = read_config(config, DataConfig)
    target = load_target(settings.target.name, jnp.dtype(settings.target.dtype))
    check_features(settings, target, resume)
    try:
        with Stop() as stop:
            folder = build_dataset(
                settings, target, resume=resume, estimate_only=estimate, stop=stop
            )
            if estimate:
                return 0
            print(f"data written to {folder}")
            if settings.features is not None:
                # The tokens of this attempt are complete, so a cache begun earlier goes on.
                cache = cache_features(settings, target, resume=resume, stop=stop)
                print(f"features written to {cache}")
    except Stopped as stopped:
        print(f"stopped after saving; continue with: dspark data {config} --resume")
        return stopped.code
    return 0
