"""Resumes a training job in one process of several, each with as many CPU devices as it is told.

python on_devices.py CONFIG.toml DEVICES PROCESS PROCESSES PORT VOCABULARY_ROWS
"""

import argparse
import os
import re
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
for name in ("devices", "process", "processes", "port", "vocabulary_rows"):
    parser.add_argument(name, type=int)
arguments = parser.parse_args()
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={arguments.devices}"
).strip()

import jax  # noqa: E402  the flag counts from the first import on

jax.config.update("jax_default_matmul_precision", "highest")
jax.distributed.initialize(f"localhost:{arguments.port}", arguments.processes, arguments.process)

from dspark_jax.checkpoints.resolve import load_target  # noqa: E402
from train import trainer  # noqa: E402
from train.config import TrainConfig, read_config  # noqa: E402

train_step = trainer.train_step


def step_with_a_look(*values):
    program = train_step.lower(*values).compile()
    widths = {int(width) for width in re.findall(r"f32\[[\d,]*,(\d+)\]", program.as_text())}
    assert arguments.vocabulary_rows in widths
    assert values[1].vocab_size not in widths, "logits of the whole vocabulary"
    # takes no other shapes and no static arguments: configs of run, drafter and target
    trainer.train_step = lambda *values: program(*values[3:])
    return trainer.train_step(*values)


trainer.train_step = step_with_a_look
config = read_config(arguments.config, TrainConfig)
target = load_target(config.target.name, config.target.dtype)
assert trainer.run_training(config, target, resume=True)
assert trainer.train_step is not step_with_a_look
assert train_step._cache_size() == 0, "the step was traced again"
