"""Training from a feature cache: the run of online features, without the target's layers."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.resolve import load_target
from train import trainer
from train.cache_features import cache_features
from train.cached_data import CachedDataset
from train.config import TargetSection
from train.data import shuffled_batches
from train.data_config import AnswersSection, DataConfig, FeaturesSection, SelfPromptingSection
from train.feature_cache import FeatureCache
from train.shards import read_dataset
from train.trainer import run_training


@pytest.fixture
def cache(tiny_run, tiny_target, tmp_path):
    """The features of the tiny run's data folder."""
    folder = Path(tiny_run.data.folders[0])
    manifest = json.loads((folder / "manifest.json").read_text()) | {"temperature": 1.0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    job = DataConfig(
        target=TargetSection("tiny"),
        answers=AnswersSection(str(folder), max_new_tokens=8, max_context=40),
        self_prompting=SelfPromptingSection(count=1),
        features=FeaturesSection(str(tmp_path / "cache"), tiny_run.drafter.target_layer_ids),
    )
    return cache_features(job, tiny_target)


@pytest.fixture
def cached_run(tiny_run, cache, tmp_path):
    """The tiny run on the cache."""
    return dataclasses.replace(
        tiny_run,
        data=dataclasses.replace(tiny_run.data, folders=(), cache=str(cache)),
        training=dataclasses.replace(tiny_run.training, output=str(tmp_path / "cached")),
    )


@pytest.fixture
def lean_target(tiny_target):
    """The target as `dspark train` loads it beside a cache."""
    weights = tiny_target.weights.replace(layers=())
    return dataclasses.replace(tiny_target, weights=weights)


def lines(run):
    return [json.loads(line) for line in (Path(run.training.output) / "metrics.jsonl").open()]


def test_a_cache_trains_like_online_features_without_layers_and_resumes_bit_for_bit(
    tiny_run, cached_run, tiny_target, lean_target, tmp_path, monkeypatch
):
    assert run_training(tiny_run, tiny_target)
    assert run_training(cached_run, lean_target)
    online, cached = lines(tiny_run), lines(cached_run)
    assert len(cached) == 12
    for one, other in zip(online, cached, strict=True):
        # the cache rounds features to bf16
        assert other["loss"] == pytest.approx(one["loss"], rel=0.01)
        assert other["learning_rate"] == one["learning_rate"]

    section = dataclasses.replace(cached_run.training, output=str(tmp_path / "broken"))
    broken = dataclasses.replace(cached_run, training=section)
    step, count = trainer.train_step, iter(range(1, 100))

    def interrupted(*arguments):
        if next(count) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", interrupted)
        assert not run_training(broken, lean_target)
    assert run_training(broken, lean_target, resume=True)
    assert lines(broken) == cached


def test_batches_of_a_cache_are_those_of_its_data_folder_with_features(tiny_run, cache):
    documents = read_dataset(Path(tiny_run.data.folders[0]))
    dataset = CachedDataset(FeatureCache(cache), 24, 1)
    assert len(dataset) == len(documents)
    batch = next(shuffled_batches(dataset, batch_size=3, length=24, seed=1))
    plain = [documents[index].tokens[:24].tolist() for index in range(len(documents))]
    for row in range(3):
        own = batch["tokens"][row].tolist()
        assert any(own[: len(one)] == one for one in plain)
        assert not batch["taps"][row, 24:].any()
    assert batch["taps"].shape == (3, 24, 2 * 48)
    assert batch["last_hidden"].shape == (3, 24, 48)
    assert batch["taps"].dtype == jnp.bfloat16


def test_documents_with_too_little_to_learn_from_are_left_out(cache):
    whole = FeatureCache(cache)
    supervised = [int(whole.loss_mask(index)[:24].sum()) for index in range(len(whole))]
    dataset = CachedDataset(whole, 24, 15)
    assert 0 < len(dataset) == sum(count >= 15 for count in supervised) < len(whole)
    assert all(dataset[index].loss_mask.sum() >= 15 for index in range(len(dataset)))
    with pytest.raises(ValueError, match=r"none of 21 documents has 99 supervised"):
        CachedDataset(whole, 24, 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": (0,)}, r"has target_layer_ids \[0, 1\], the run has \[0\]"),
        ({}, r"has target 'tests/golden/llama_tiny', the run has 'other'"),
    ],
)
def test_a_cache_of_something_else_is_refused(cached_run, lean_target, change, message):
    run = dataclasses.replace(cached_run, drafter=dataclasses.replace(cached_run.drafter, **change))
    target = lean_target if change else dataclasses.replace(lean_target, name="other")
    with pytest.raises(ValueError, match=message):
        run_training(run, target)


@pytest.mark.parametrize("source", [{"folders": (), "cache": None}, {"cache": "both"}])
def test_one_source_of_documents_is_wanted(tiny_run, source):
    with pytest.raises(ValueError, match=r"data\.cache is .* give one of the two"):
        dataclasses.replace(tiny_run.data, **source)


def test_a_target_without_its_layers_brings_embedding_and_head(request):
    folder = request.path.parents[1] / "golden" / "llama_tiny"
    lean, whole = load_target(folder, jnp.float32, layers=False), load_target(folder, jnp.float32)
    assert lean.weights.layers == ()
    np.testing.assert_array_equal(lean.weights.head, whole.weights.head)
    np.testing.assert_array_equal(lean.weights.embed, whole.weights.embed)
