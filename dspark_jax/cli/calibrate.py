"""`dspark calibrate`: fit the temperatures of a confidence head as a TOML config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def calibrate(config: Annotated[Path, tyro.conf.Positional], resume: bool = False) -> int:
    """Fit STS on real verification and measure it on held-out prompts.

    Args:
        config: TOML file of the run; see ``configs/``.
        resume: continue the run in its output folder; finished answers are kept.
    """
    # JAX and the training packages load only when a run begins.
    import jax.numpy as jnp

    from dspark_jax.checkpoints.drafter import load_drafter
    from dspark_jax.checkpoints.resolve import load_target
    from train.calibrate import CALIBRATION, print_reports, run_calibration
    from train.calibrate_config import CalibrateConfig
    from train.config import read_config
    from train.stopping import Stop, Stopped

    settings = read_config(config, CalibrateConfig)
    target = drafter = None
    if settings.collect is not None:
        dtype = jnp.dtype(settings.target.dtype)
        target = load_target(settings.target.name, dtype)
        drafter = load_drafter(
            settings.drafter.name,
            (target.config, target.weights),
            dtype,
            stop_token_ids=target.stop_token_ids,
        )
    try:
        with Stop() as stop:
            reports = run_calibration(settings, target, drafter, resume=resume, stop=stop)
    except Stopped as stopped:
        print(f"stopped after saving; continue with: dspark calibrate {config} --resume")
        return stopped.code
    print_reports(reports)
    print(f"calibration written to {Path(settings.output.folder) / CALIBRATION}")
    return 0
