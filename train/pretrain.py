"""The pretraining job: a small DeepSeek-shaped target from the answers of another model."""

from __future__ import annotations

from pathlib import Path

import jax
from jaxtyping import Array

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.checkpoints.save_target import save_target
from dspark_jax.text.text import Text
from train.checkpointing import Checkpoints
from train.data import TokenDataset, fit_to_length, join, shuffled_batches
from train.loop import check_batch, leads, newest, run_steps
from train.mesh import rules_of, training_mesh, whole
from train.metrics import MetricsLog
from train.new_target import check_model, new_weights
from train.pretrain_config import PretrainConfig
from train.pretrain_step import (
    PretrainState,
    compiled_part,
    initial_state,
    pretrain_step,
    served_weights,
    split_tables,
)
from train.run_folder import open_run
from train.shards import read_dataset
from train.step import StepReport
from train.stopping import Stop

TARGET = "target"
MINIMUM = 2
"""Supervised tokens of a document worth reading."""


def run_pretraining(
    config: PretrainConfig,
    teacher: LoadedTarget,
    *,
    resume: bool = False,
    stop: Stop | None = None,
) -> bool:
    """Train until ``config.training.steps`` steps are done, or until SIGTERM or Ctrl-C.

    The folder ``config.training.output`` receives the run's record, metrics, checkpoints and,
    at the end, ``target/``: a checkpoint for ``load_target`` in the run's compute dtype, under
    DeepSeek's names, with the tokenizer of ``teacher``.

    Args:
        config: the run.
        teacher: wrote the data; its layers are not needed.
        resume: continue from the newest checkpoint.
        stop: knows afterwards which signal came.

    Returns:
        True when the run is finished; False when a signal stopped it, after saving.

    Raises:
        ValueError: sizes that contradict each other, a vocabulary that does not hold the
            teacher's, data of another model, a changed run.
        FileExistsError: a run without ``resume``; FileNotFoundError: none with it.
    """
    folder, settings = Path(config.training.output), config.training
    mesh, rules = training_mesh(config.mesh), rules_of(config.mesh)
    check_batch(settings.batch_size, mesh)
    check_model(config.model)
    text = _checked_text(config, teacher)
    data = _load_data(config, teacher.name)
    if leads():
        open_run(folder, config, data.fingerprint, resume)
    batches = shuffled_batches(
        data,
        batch_size=settings.batch_size,
        length=config.data.sequence_length,
        seed=settings.seed,
    )
    learnt, tables = split_tables(new_weights(config.model, settings.seed, settings.dtype))
    dtypes = tuple(leaf.dtype.name for leaf in jax.tree.leaves(learnt))
    checkpoints = Checkpoints(folder / "checkpoints")
    state, done = newest(checkpoints, initial_state(config, learnt), batches, resume)
    del learnt
    program = compiled_part(config)

    def step(state: PretrainState, batch: dict[str, Array]) -> tuple[PretrainState, StepReport]:
        return pretrain_step(program, dtypes, state, tables, batch["tokens"], batch["loss_mask"])

    log = MetricsLog(folder, done) if leads() else None
    try:
        state, done = run_steps(
            step,
            state,
            done,
            batches,
            checkpoints,
            log,
            settings=settings,
            mesh=mesh,
            rules=rules,
            stop=stop or Stop(),
            note=lambda figures: f"loss {figures['loss']:.3f}",
        )
    finally:
        if log is not None:
            log.close()
        checkpoints.close()
    if done < settings.steps:
        return False
    weights = whole(mesh, served_weights(state.weights, tables, dtypes))
    if leads():
        save_target(
            config.model,
            jax.device_get(weights),
            folder / TARGET,
            text=text,
            stop_token_ids=teacher.stop_token_ids,
        )
    return True


def _checked_text(config: PretrainConfig, teacher: LoadedTarget) -> Text:
    """The teacher's tokenizer, if it has one whose ids the new target has rows for."""
    text = teacher.text
    if text is None:
        raise ValueError(f"teacher {teacher.name} has no tokenizer for a new target to take over")
    size = config.model.vocab_size
    if size < text.vocab_size:
        raise ValueError(
            f"{config.model.model_type}.vocab_size is {size}, the tokenizer of {teacher.name} has "
            f"{text.vocab_size} ids"
        )
    return text


def _load_data(config: PretrainConfig, teacher: str) -> TokenDataset:
    """The run's documents, cut to length."""
    dataset = join([read_dataset(Path(folder)) for folder in config.data.folders])
    if dataset.manifest["target"] != teacher:
        raise ValueError(
            f"the data in {config.data.folders[0]} was written by {dataset.manifest['target']!r}, "
            f"the run's teacher is {teacher!r}"
        )
    return fit_to_length(dataset, config.data.sequence_length, MINIMUM)
