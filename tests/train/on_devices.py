"""Runs a training job in a process of its own, on as many CPU devices as it is told.

python on_devices.py CONFIG.toml --devices N [--resume] [--stop-after N]
    [--process I OF PORT] [--vocabulary-rows N]
"""

import argparse
import os
import re
import signal
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("--devices", type=int, required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--stop-after", type=int)
parser.add_argument("--process", type=int, nargs=3)
parser.add_argument("--vocabulary-rows", type=int)
arguments = parser.parse_args()
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={arguments.devices}"
).strip()

import jax  # noqa: E402  the flag counts from the first import on

jax.config.update("jax_default_matmul_precision", "highest")
if arguments.process:
    index, of, port = arguments.process
    jax.distributed.initialize(f"localhost:{port}", of, index)

from dspark_jax.checkpoints.resolve import load_target  # noqa: E402
from train import trainer  # noqa: E402
from train.config import TrainConfig, read_config  # noqa: E402
from train.step import train_step  # noqa: E402

if arguments.stop_after:
    real, taken = trainer.train_step, iter(range(1, 1000))

    def step(*values):
        if next(taken) == arguments.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*values)

    trainer.train_step = step

if arguments.vocabulary_rows:
    inner = trainer.train_step

    def step_with_a_look(*values):
        program = inner.lower(*values).compile()
        text = program.as_text()
        widths = {int(width) for width in re.findall(r"f32\[[\d,]*,(\d+)\]", text)}
        assert arguments.vocabulary_rows in widths
        assert values[1].vocab_size not in widths, "logits of the whole vocabulary"
        # takes no other shapes and no static arguments: configs of run, drafter and target
        trainer.train_step = lambda *values: program(*values[3:])
        return trainer.train_step(*values)

    trainer.train_step = step_with_a_look

config = read_config(arguments.config, TrainConfig)
finished = trainer.run_training(
    config, load_target(config.target.name, config.target.dtype), resume=arguments.resume
)
assert finished == (arguments.stop_after is None)
programs = 0 if arguments.vocabulary_rows else 1
assert train_step._cache_size() == programs, "the step was traced again"
