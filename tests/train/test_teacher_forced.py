"""Teacher-forced quality: agrees with the training metrics, and knows a perfect drafter."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.testing.markov import MarkovTargetConfig
from train import teacher_forced as module
from train.anchors import sample_anchors
from train.features import target_features
from train.forward import Sequences, drafter_terms
from train.initialize import drafter_config, initial_weights
from train.losses import LossConfig
from train.shards import read_dataset
from train.teacher_forced import teacher_forced


@pytest.fixture
def folder(tiny_run):
    path = Path(tiny_run.data.folders[0])
    manifest = json.loads((path / "manifest.json").read_text()) | {"temperature": 1.0}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def drafter(tiny_run, tiny_target):
    config = drafter_config(tiny_run.drafter, tiny_target)
    return LoadedDrafter(config, initial_weights(config, jax.random.key(0)), "tiny")


def test_the_expected_length_is_that_of_the_training_metrics(folder, drafter, tiny_target):
    dataset = read_dataset(folder)
    one = dataclasses.replace(
        dataset,
        offsets=dataset.offsets[:2],
        tokens=dataset.tokens[: dataset.offsets[1]],
        loss_mask=dataset.loss_mask[: dataset.offsets[1]],
    )
    found = teacher_forced(drafter, tiny_target, one, temperature=1.0, length=32, num_anchors=8)
    tokens = np.zeros((module.BATCH, 32), np.int32)
    tokens[0, : len(one.tokens)] = one.tokens[:32]
    mask = np.zeros((module.BATCH, 32), bool)
    mask[0, : len(one.tokens)] = one.loss_mask[:32]
    taps, last = jax.jit(target_features, static_argnums=(0, 3))(
        tiny_target.config, tiny_target.weights, tokens, drafter.config.target_layer_ids
    )
    key = jax.random.fold_in(jax.random.key(0), 0)
    anchors, keep = sample_anchors(key, jnp.asarray(mask), 8)
    embed = tiny_target.weights.embed
    terms = jax.jit(drafter_terms, static_argnums=(0, 7, 8))(
        drafter.config,
        drafter.weights,
        embed,
        tiny_target.weights.head,
        Sequences(tokens, mask, taps, last),
        anchors,
        keep,
        LossConfig(),
        8,
    )
    metrics = terms.metrics
    np.testing.assert_allclose(
        found.expected_length, metrics["tau_probabilistic"].value(), rtol=1e-5
    )
    accepted = [metrics[f"accept_rate@{j}"].value() for j in range(4)]
    np.testing.assert_allclose(found.acceptance, accepted, rtol=1e-5)
    product = np.cumprod(found.conditional_acceptance).sum()
    assert found.expected_length <= 1 + product + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_drafter_with_the_targets_own_logits_is_always_accepted(
    folder, drafter, tiny_target, temperature, monkeypatch
):
    def perfect(config, weights, head, blocks):
        return module.frozen_logits(blocks.target_hidden, head), None

    # the cache of traces does not know what is patched
    module._acceptance_sums.clear_cache()
    monkeypatch.setattr(module, "block_logits", perfect)
    found = teacher_forced(
        drafter,
        tiny_target,
        read_dataset(folder),
        temperature=temperature,
        length=32,
        num_anchors=8,
    )
    module._acceptance_sums.clear_cache()
    np.testing.assert_allclose(found.conditional_acceptance, 1.0, atol=1e-5)
    assert 4 < found.expected_length <= 5


def test_documents_of_another_target_are_refused(folder, drafter, tiny_target):
    other = dataclasses.replace(tiny_target, name="other")
    with pytest.raises(ValueError, match="'other'"):
        teacher_forced(drafter, other, read_dataset(folder), temperature=1.0, length=32)


def test_a_pair_that_only_decodes_is_refused_by_its_kind(folder, drafter, tiny_target):
    toy = dataclasses.replace(tiny_target, config=MarkovTargetConfig(8))
    with pytest.raises(
        ValueError, match=r"has a MarkovTargetConfig.*: set evaluation\.teacher_forced"
    ):
        teacher_forced(drafter, toy, read_dataset(folder), temperature=1.0, length=32)
