"""Pretraining: a new target of either family learns, and is read back as what was trained."""

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.models.experts import Experts, routed_experts
from dspark_jax.models.ragged import rectangle
from dspark_jax.testing import deepseek_v4, deepseek_v32
from train import pretrain
from train.calibrate import CALIBRATION
from train.calibrate_config import CalibrateConfig
from train.config import TrainConfig, read_config
from train.data import supervised_answer
from train.data_config import DataConfig
from train.evaluate_config import EvaluateConfig
from train.features import target_features
from train.initialize import drafter_config
from train.mesh import MeshSection
from train.new_target import check_model, new_weights
from train.optimizer import backbone_matrices
from train.pretrain import TARGET, run_pretraining
from train.pretrain_config import PretrainConfig, PretrainingSection, TeacherSection, TextSection
from train.pretrain_step import (
    balanced,
    next_token_loss,
    pretrain_step,
    split_tables,
)
from train.sequence_attention import choose_keys, indexer_loss, mix_values
from train.sequence_experts import expert_load, sequence_experts
from train.sequence_output import LayerReport
from train.shards import write_manifest, write_shard
from train.trainer import DRAFTER, run_training

CONFIGS = Path(__file__).parents[2] / "configs"
VOCABULARY, LENGTH, STEPS = 160, 24, 20
V4 = deepseek_v4.toy_config(vocab_size=VOCABULARY)
V32 = deepseek_v32.toy_config(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents in which a token decides the next one: seven words in turn, from any on."""
    folder = tmp_path_factory.mktemp("text") / "data"
    turns = np.arange(60) % 7 + 20
    documents = [
        supervised_answer(turns[start : start + 4], turns[start + 4 : start + size])
        for start, size in np.random.default_rng(0).integers((0, 14), (20, 30), (40, 2))
    ]
    write_manifest(folder, {"target": "teacher", "template_sha256": ""})
    write_shard(folder, 0, documents)
    return folder


@pytest.fixture(scope="module")
def base(data):
    """A run whose family is still to be chosen."""
    return functools.partial(
        PretrainConfig,
        TeacherSection("teacher"),
        TextSection((str(data),), LENGTH),
        mesh=MeshSection(),
    )


@pytest.fixture(scope="module")
def teacher(chatty):
    return dataclasses.replace(chatty, name="teacher")


def section(folder, **changes):
    settings = {"steps": STEPS, "learning_rate": 1e-2, "batch_size": 8, "dtype": "float32"}
    return PretrainingSection(str(folder), **{**settings, "log_every": 1, **changes})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def stop_after(monkeypatch, steps):
    real, count = pretrain.pretrain_step, iter(range(1, 1000))

    def step(*arguments):
        if next(count) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(pretrain, "pretrain_step", step)


@pytest.fixture(scope="module")
def unbroken(base, teacher, tmp_path_factory):
    """The folder of a family's whole run, its model, and the weights that it ended with."""

    @functools.cache
    def run(family):
        folder = tmp_path_factory.mktemp(family)
        model = {"deepseek_v4": V4, "deepseek_v32": V32}[family]
        served, ended = pretrain.served_weights, []

        def noted(*parts):
            ended.append(served(*parts))
            return ended[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrain, "served_weights", noted)
            programs = pretrain_step._cache_size()
            assert run_pretraining(base(section(folder), **{family: model}), teacher)
            assert pretrain_step._cache_size() <= programs + 1
        return folder, model, ended[0]

    return run


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32"])
def test_a_target_learns_and_is_read_back_as_it_was_trained(family, unbroken, teacher):
    folder, model, ended = unbroken(family)
    figures = lines(folder)
    assert len(figures) == STEPS
    losses = [line["loss"] for line in figures]
    assert losses[0] > 4.5
    assert losses[-1] < 0.5 * losses[0]
    indexer = [line["indexer_loss"] for line in figures]
    assert 0 < indexer[-1] < 0.5

    loaded = load_target(folder / TARGET, "float32")
    assert loaded.config == model
    assert loaded.stop_token_ids == teacher.stop_token_ids
    messages = [{"role": "user", "content": "w1 w2"}]
    assert loaded.text.chat_ids(messages) == teacher.text.chat_ids(messages)
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, ended)
    tokens = jnp.asarray((np.arange(2 * LENGTH) % 7 + 20).reshape(2, LENGTH))
    (trained, taps), (logits, wanted) = both_forwards(model, loaded.weights, tokens)
    np.testing.assert_allclose(trained, logits, atol=1e-3)
    np.testing.assert_allclose(taps, wanted, atol=1e-4)
    right = jnp.argmax(logits[:, 8:-1], axis=-1) == tokens[:, 9:]
    assert right.mean() > 0.9


def test_a_run_that_is_stopped_and_resumed_equals_an_unbroken_one(
    base, teacher, unbroken, tmp_path, monkeypatch
):
    whole, *_ = unbroken("deepseek_v32")
    broken = base(section(tmp_path), deepseek_v32=V32)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert not run_pretraining(broken, teacher)
    assert not (tmp_path / TARGET).exists()
    assert run_pretraining(broken, teacher, resume=True)
    assert lines(whole) == lines(tmp_path)
    first, second = (folder / TARGET / "model.safetensors" for folder in (whole, tmp_path))
    assert first.read_bytes() == second.read_bytes()
    changed = dataclasses.replace(V32, index_topk=7)
    with pytest.raises(ValueError, match=r"config\.deepseek_v32\.index_topk was 6 and is 7"):
        run_pretraining(base(section(tmp_path), deepseek_v32=changed), teacher, resume=True)


@functools.partial(jax.jit, static_argnums=0)
def both_forwards(config, weights, tokens):
    """Logits and taps of the forward that trains, and of a prefill."""
    rows, length = tokens.shape
    pairs = [target_features(config, weights, tokens, (1, -1, 0))]
    cache = config.family.init_cache(config, rows, length, jnp.float32)
    packed = rectangle(tokens, jnp.zeros(rows, jnp.int32), jnp.full(rows, length))
    served, taps, _ = config.family.forward(config, weights, cache, packed, taps=(1, -1, 0))
    pairs.append((taps, served))
    return [
        (
            config.family.unembed(config, weights, hidden.reshape(rows, length, -1)),
            taps.reshape(rows, length, -1),
        )
        for taps, hidden in pairs
    ]


def test_few_experts_all_run_and_many_are_visited_with_the_same_result():
    random = np.random.default_rng(1)
    matrix = functools.partial(random.normal, scale=0.3)
    experts = Experts(
        gate_up=jnp.asarray(matrix(size=(4, 12, 8)), jnp.float32),
        down=jnp.asarray(matrix(size=(4, 8, 6)), jnp.float32),
    )
    x = jnp.asarray(random.normal(size=(9, 8)), jnp.float32)
    ids = jnp.asarray(np.argsort(random.random((9, 4)))[:, :2], jnp.int32)
    weights = jnp.asarray(random.random((9, 2)), jnp.float32)

    @jax.jit
    def run(*rows):
        return sequence_experts(*rows, 0.5), routed_experts(*rows, limit=0.5)

    np.testing.assert_allclose(*run(x, ids, weights, experts), atol=1e-6)


def test_the_load_counts_real_tokens_and_moves_biases_against_it():
    ids = jnp.asarray([[0, 1], [0, 2], [3, 2]])
    load = expert_load(ids, jnp.asarray([True, True, False]), 4)
    np.testing.assert_allclose(load, [0.5, 0.25, 0.25, 0])
    weights = new_weights(dataclasses.replace(V32, num_hidden_layers=2), 0, "float32")
    reports = (LayerReport(None, None), LayerReport(None, load))
    found = balanced(weights, reports)
    np.testing.assert_allclose(found.layers[1].ffn.bias, [-1e-3, 0, 0, 1e-3])
    assert found.layers[0] is weights.layers[0]


def test_keys_are_chosen_by_score_among_those_seen_and_all_where_they_are_few():
    scores = jnp.asarray([[[5.0, 9, 9, 9], [1, 2, 9, 9], [3, 1, 2, 9], [1, 1, 4, 1]]])
    seen = jnp.arange(1, 5)
    choose = jax.jit(choose_keys, static_argnums=2)
    chosen = choose(scores, seen, 2)[0].astype(int)
    assert chosen.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(choose(scores, seen, 4)[0], np.tri(4))


def test_values_are_mixed_in_bf16_as_in_fp32():
    """Not every product of 16-bit numbers that ends in fp32 runs on a CPU."""
    random = np.random.default_rng(0)
    weights = jnp.asarray(random.random((2, 3, 5, 7)), jnp.float32)
    values = jnp.asarray(random.normal(size=(2, 7, 4)), jnp.bfloat16)
    mix = jax.jit(mix_values)
    found = mix(weights, values)
    assert found.dtype == jnp.bfloat16
    wanted = mix(weights, values.astype(jnp.float32))
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0.02, atol=0.05)


def test_an_indexer_is_taught_by_the_heads_and_does_not_teach_them():
    weights = jnp.asarray([[[[0.2, 0.0], [0.1, 0.3]], [[0.6, 0.0], [0.1, 0.1]]]])
    seen, real = jnp.asarray([1, 2]), np.ones((1, 2), bool)
    right = np.log(np.array([[[1.0, 1.0], [0.2, 0.4]]], np.float32))
    even = np.zeros((1, 2, 2), np.float32)

    @jax.jit
    def loss(scores, real):
        return jax.value_and_grad(indexer_loss, (0, 1))(weights, scores, seen, real)

    assert abs(loss(right, real)[0]) < 1e-6
    wrong, (heads, scores) = loss(even, real)
    teacher = np.array([1 / 3, 2 / 3])
    assert wrong == pytest.approx((teacher * np.log(2 * teacher)).sum() / 2, rel=1e-5)
    assert loss(even, np.array([[True, False]]))[0] == 0
    assert not heads.any()
    np.testing.assert_allclose(scores[0], [[0, 0], [1 / 12, -1 / 12]], atol=1e-6)


def test_a_token_that_sees_no_entry_leaves_no_nan_in_the_indexers_gradient():
    gradient = jax.jit(jax.grad(indexer_loss, 1))(
        jnp.zeros((1, 1, 2, 1)), jnp.zeros((1, 2, 1)), jnp.asarray([0, 0]), jnp.ones((1, 2), bool)
    )
    assert not gradient.any()


def test_next_tokens_are_counted_within_documents_alone():
    head = jnp.eye(4)
    tokens = jnp.asarray([[0, 1, 2, 3], [2, 1, 0, 0]])
    hidden = 10 * jax.nn.one_hot([[1, 2, 0, 1], [1, 0, 0, 0]], 4)
    real = jnp.asarray([[True] * 4, [True, True, False, False]])
    found = jax.jit(next_token_loss)(hidden, head, tokens, real)
    assert found["accuracy"].denominator == 4
    assert found["accuracy"].numerator == 3
    wanted = 4 * np.log(np.exp(10) + 3) - 30
    assert found["cross_entropy"].numerator == pytest.approx(wanted, rel=1e-5)


def test_muon_takes_matrices_of_layers_and_leaves_tables_and_mixtures_to_adamw():
    learnt, tables = split_tables(new_weights(V4, 0, "float32"))
    marks = backbone_matrices(learnt)
    assert marks.embed is None
    assert marks.head is None
    first = marks.layers[0]
    assert first.attention_mix.fn is None
    assert first.attention.compressor.ape is None
    assert first.attention_norm is None
    assert first.attention.query_b is not None
    assert first.moe.experts.down is not None
    (table,) = jax.tree.leaves(tables)
    assert table.shape == (VOCABULARY, 2)
    assert (table[:, 0] != table[:, 1]).all()


def test_new_weights_follow_from_the_seed():
    one, again, other = (new_weights(V32, seed, "float32").layers[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.attention.wide, again.attention.wide)
    assert not np.array_equal(one.attention.wide, other.attention.wide)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": {"num_experts_per_tok": 5}}, r"\[deepseek_v32\]: num_experts_per_tok is 5"),
        ({"model": {"vocab_size": 100}}, r"deepseek_v32.vocab_size is 100, the tokenizer of"),
        ({"model": {"max_position_embeddings": 16}}, "data.sequence_length is 24, but the target"),
        ({"training": {"steps": 0}}, r"training\.steps is 0; it must be at least 1"),
        ({"training": {"learning_rate": 0.0}}, r"training\.learning_rate is 0\.0"),
        ({"training": {"seed": -1}}, r"training\.seed is -1"),
        ({"teacher": "other"}, "was written by 'teacher', the run's teacher is 'other'"),
        ({"text": None}, "teacher teacher has no tokenizer"),
        ({"family": "both"}, "give one of the sections deepseek_v32 and deepseek_v4"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    base, teacher, tmp_path, changes, fault
):
    teacher = dataclasses.replace(
        teacher, name=changes.get("teacher", "teacher"), text=changes.get("text", teacher.text)
    )
    families = {"deepseek_v32": dataclasses.replace(V32, **changes.get("model", {}))}
    if "family" in changes:
        families["deepseek_v4"] = V4
    with pytest.raises(ValueError, match=fault):
        run_pretraining(
            base(section(tmp_path / "run", **changes.get("training", {})), **families), teacher
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("family", "ratio"), [("v4", 4), ("v32", 1)])
def test_the_shipped_configs_fit_together(family, ratio):
    def read(kind, suffix=""):
        return read_config(CONFIGS / f"deepseek-{family}-small{suffix}.toml", kind)

    run = read(PretrainConfig)
    check_model(run.model)
    assert run.model.index_topk < run.data.sequence_length // ratio
    target = f"{run.training.output}/{TARGET}"
    answers, drafter = read(DataConfig, "-data"), read(TrainConfig, "-dspark")
    calibrate, evaluate = read(CalibrateConfig, "-calibrate"), read(EvaluateConfig, "-evaluate")
    assert {one.target.name for one in (answers, drafter, calibrate, evaluate)} == {target}
    assert drafter.data.folders == (answers.answers.output,)
    trained = f"{drafter.training.output}/{DRAFTER}"
    assert calibrate.drafter.name == evaluate.drafter.name == trained
    assert evaluate.evaluation.calibration == f"{calibrate.output.folder}/{CALIBRATION}"
    drafter_config(drafter.drafter, LoadedTarget(run.model, None, None, (), target))


def test_a_drafter_is_trained_for_such_a_target(tiny_run, tmp_path):
    name = tiny_run.target.name
    model = dataclasses.replace(V32, num_hidden_layers=1)
    target = LoadedTarget(model, new_weights(model, 0, "float32"), None, (), name)
    run = dataclasses.replace(
        tiny_run,
        drafter=dataclasses.replace(tiny_run.drafter, target_layer_ids=(-1,)),
        training=dataclasses.replace(tiny_run.training, steps=3, output=str(tmp_path / "run")),
    )
    assert run_training(run, target)
    drafter = load_drafter(tmp_path / "run" / DRAFTER, (model, target.weights)).config
    assert (drafter.num_attention_heads, drafter.num_key_value_heads, drafter.head_dim) == (
        1,
        1,
        32,
    )
    assert drafter.intermediate_size == 96
    written = json.loads((tmp_path / "run" / DRAFTER / "config.json").read_text())
    verifier = written["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["DeepseekV32ForCausalLM"]
