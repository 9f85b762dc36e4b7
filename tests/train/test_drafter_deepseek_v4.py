"""DeepSeek-V4's own drafter: trained as it decodes, and served as it was trained."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.drafter.deepseek_v4 import dspark
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.drafter.validate import DrafterMismatch
from dspark_jax.testing.deepseek_v4 import save_pair, toy_config
from train import trainer
from train.config import DeepseekV4DrafterSection, TrainConfig, from_table, read_config
from train.data import supervised_answer
from train.drafters import described_drafter, family_of, training_weights
from train.forward import Sequences, block_logits, draft_blocks, drafter_terms
from train.losses import LossConfig
from train.pretrain_config import PretrainConfig
from train.shards import write_manifest, write_shard
from train.step import TrainState, compiled_part, optimizer_of, state_shardings, train_step
from train.teacher_forced import check_supported
from train.trainer import DRAFTER, run_training

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = toy_config(num_hidden_layers=1, compress_ratios=(0,))
CONFIG = DeepseekV4DrafterConfig(MODEL, 4, (-1, 0), 63, 32)
ONE_STAGE = dataclasses.replace(CONFIG, target_layer_ids=(0,))
WINDOW, LENGTH, STEPS = MODEL.sliding_window, 24, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target that is nearly a table over its last token, with a drafter beside it."""
    path = tmp_path_factory.mktemp("v4")
    save_pair(path, CONFIG)
    return path


@pytest.fixture(scope="module")
def target(folder):
    """Sharp enough that chance agrees with it rarely."""
    loaded = load_target(folder, "float32")
    weights = dataclasses.replace(loaded.weights, norm=6 * loaded.weights.norm)
    return dataclasses.replace(loaded, weights=weights, name="toy")


@pytest.fixture(scope="module")
def shipped(folder, target):
    return load_drafter(folder, (target.config, target.weights))


@jax.jit
def both(weights, embed, head, batch, anchors):
    """Hidden states, logits and confidences of blocks, by training and by decoding."""
    keep = jnp.ones(anchors.shape, bool)
    blocks, _ = draft_blocks(CONFIG, weights, embed, batch, anchors, keep)
    trained = (blocks.hidden, *block_logits(CONFIG, weights, head, blocks))

    count, length = anchors.shape[1], batch.tokens.shape[1]
    slot = jnp.repeat(jnp.arange(count), length)
    position = jnp.tile(jnp.arange(length), count)
    # what has been committed when a block is drafted: everything before its anchor
    slot = jnp.where(position < anchors[0][slot], slot, -1)
    context = dspark.init_context(CONFIG, count, length, jnp.float32)
    rows = jnp.tile(batch.taps[0], (count, 1))
    context = dspark.commit_context(CONFIG, weights, context, rows, slot, position)
    tokens = batch.tokens[0][anchors[0]]
    hidden = dspark.block_hidden(CONFIG, weights, embed, context, tokens, anchors[0])
    base = dspark.base_logits(CONFIG, weights, head, hidden)
    flat = hidden.reshape(-1, hidden.shape[-1])
    bias, _ = dspark.walk(CONFIG, weights, None, flat, blocks.previous.reshape(-1))
    confidence = dspark.confidences(CONFIG, weights, hidden, blocks.previous[0])
    drafted = base + bias.reshape(base.shape)
    return trained, (hidden[None], drafted[None], confidence[None])


def test_blocks_at_anchors_are_those_that_decoding_drafts(target, shipped):
    """No context, less than a window, just one, and more than one."""
    random = np.random.default_rng(0)
    batch = Sequences(
        tokens=jnp.asarray(random.integers(0, 63, (1, LENGTH))),
        loss_mask=jnp.ones((1, LENGTH), bool),
        taps=jnp.asarray(random.normal(size=(1, LENGTH, 64)), jnp.float32),
        last_hidden=jnp.zeros((1, LENGTH, 32)),
    )
    anchors = jnp.array([[0, 5, WINDOW, 19]])
    trained, decoded = both(
        shipped.weights, target.weights.embed, target.weights.head, batch, anchors
    )
    for name, one, other in zip(("hidden", "logits", "confidence"), trained, decoded, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, err_msg=name)


def run_in(path: Path, **training) -> TrainConfig:
    table = {
        "target": {"name": "toy", "dtype": "float32"},
        "data": {"folders": [str(path.parent / "data")], "sequence_length": LENGTH},
        "deepseek_v4_drafter": {
            "block_size": 4,
            "target_layer_ids": [0],
            "mask_token_id": 63,
            "markov_rank": 32,
        },
        "training": {
            "output": str(path),
            "steps": STEPS,
            "learning_rate": 3e-2,
            "batch_size": 8,
            "num_anchors": 12,
            "anchor_chunk": 12,
            "dtype": "float32",
            "log_every": 4,
            **training,
        },
    }
    return from_table(table, TrainConfig, "toy run")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of documents of words at random, which a table decides nothing of."""
    path = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(1)
    documents = [
        supervised_answer(random.integers(0, 63, 2), random.integers(0, 63, LENGTH - 2))
        for _ in range(32)
    ]
    write_manifest(path / "data", {"target": "toy", "template_sha256": ""})
    write_shard(path / "data", 0, documents)
    return path


@pytest.fixture(scope="module")
def trained(runs, target):
    """A whole run, what it ended with, and the drafter that it left."""
    run = run_in(runs / "unbroken")
    family, ended = family_of(ONE_STAGE), []
    served = family.served

    def noted(weights, dtype):
        ended.append(served(weights, dtype))
        return ended[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "served", noted)
        programs = train_step._cache_size()
        assert run_training(run, target)
        assert train_step._cache_size() <= programs + 1
    loaded = load_drafter(runs / "unbroken" / DRAFTER, (target.config, target.weights))
    return run, ended[-1], loaded


def lines(run):
    return [json.loads(line) for line in (Path(run.training.output) / "metrics.jsonl").open()]


def test_a_drafter_learns_is_read_back_as_it_was_trained_and_its_experts_are_steered(trained):
    run, ended, loaded = trained
    figures = lines(run)
    assert figures[0]["tau_probabilistic"] < 1.4
    assert figures[-1]["tau_probabilistic"] > 2
    assert 1 <= figures[-1]["expert_load"] < 2
    assert loaded.config == ONE_STAGE
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, ended)
    for stage in loaded.weights.stages:
        # a fixed step up, down or none for each batch, and nothing else
        steps = np.asarray(stage.moe.bias) / 1e-3
        assert np.any(steps)
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-2)


def test_what_was_trained_is_decoded_with_and_agrees_far_more_often_than_chance(trained, target):
    """Chance takes one draft in 64."""
    session = Generator(target, trained[2], mode="static", batch=4, max_context=48, chunk_steps=8)
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    answers = session.generate([Request((word, word + 1), params) for word in (3, 17, 29, 41)])
    assert all(len(answer.token_ids) == 24 for answer in answers)
    assert np.mean([answer.accepted_length for answer in answers]) > 1.5


def test_a_run_that_is_stopped_and_resumed_equals_an_unbroken_one(
    trained, runs, target, monkeypatch
):
    run, real, count = trained[0], trainer.train_step, iter(range(1, 1000))
    broken = run_in(runs / "broken")

    def step(*arguments):
        if next(count) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        assert not run_training(broken, target)
    assert lines(broken)[-1]["step"] == 7
    assert run_training(broken, target, resume=True)
    assert lines(broken)[-1] == lines(run)[-1]
    first, second = (
        (Path(one.training.output) / DRAFTER / "model.safetensors").read_bytes()
        for one in (run, broken)
    )
    assert first == second


def test_with_the_confidence_head_alone_in_training_nothing_else_moves_biases_included(
    trained, target
):
    config = run_in(Path("unwritten"), start_from="given", trainable="confidence_head", steps=2)
    weights = jax.tree.map(jnp.copy, trained[2].weights)
    optimizer = optimizer_of(config)[0].init(weights)
    state = TrainState(weights, optimizer, jnp.int32(0), jnp.zeros(2, jnp.uint32))
    state = jax.device_put(state, state_shardings(config, ONE_STAGE, state))
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 63, (2, LENGTH)))
    static = compiled_part(config), ONE_STAGE, MODEL
    # the rate of the first step is 0
    for _ in range(2):
        state, _ = train_step(*static, state, target.weights, tokens, tokens >= 0)
    before, after = trained[2].weights, state.weights
    assert np.any(np.asarray(after.confidence != before.confidence))
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        dataclasses.replace(after, confidence=before.confidence),
    )


def test_served_weights_are_written_and_read_in_the_dtypes_of_serving(shipped, target, tmp_path):
    served = family_of(CONFIG).served(shipped.weights, jnp.bfloat16)
    assert served.stages[0].attention.kv.dtype == served.markov_w1.dtype == jnp.bfloat16
    assert served.stages[0].moe.router.dtype == jnp.float32
    pair = target.config, target.weights
    save_drafter(CONFIG, served, tmp_path, pair)
    loaded = load_drafter(tmp_path, pair, jnp.bfloat16)

    def equal(one, other):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)

    jax.tree.map(equal, loaded.weights, served)


def test_a_step_in_bf16_keeps_the_small_heads_and_all_gradients_in_fp32(trained, target):
    weights = trained[2].weights
    embed = jax.ShapeDtypeStruct(target.weights.embed.shape, jnp.bfloat16)

    def part(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2, LENGTH, *shape), dtype)

    batch = Sequences(part((), jnp.int32), part((), bool), part((32,)), part((32,)))
    anchors, keep = (jax.ShapeDtypeStruct((2, 4), dtype) for dtype in (jnp.int32, bool))

    def loss(weights, embed, batch, anchors, keep):
        weights = training_weights(ONE_STAGE, weights, jnp.bfloat16)
        assert weights.markov_w2.dtype == jnp.float32
        assert weights.main_proj.dtype == jnp.bfloat16
        arguments = (ONE_STAGE, weights, embed, embed, batch, anchors, keep, LossConfig(), 2)
        return drafter_terms(*arguments).loss

    gradient = jax.eval_shape(jax.grad(loss), weights, embed, batch, anchors, keep)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("families", "extra", "fault"),
    [
        ((), {}, "give one of the sections drafter and deepseek_v4_drafter"),
        (("drafter", "deepseek_v4_drafter"), {}, "give one of the sections drafter and"),
        (("deepseek_v4_drafter",), {"markov_head_type": "rnn"}, "unknown key 'markov_head_type'"),
        (("deepseek_v4_drafter",), {"num_hidden_layers": 3}, "unknown key 'num_hidden_layers'"),
    ],
)
def test_one_family_is_described_with_options_of_its_own(families, extra, fault):
    shared = {"block_size": 4, "target_layer_ids": [-1, 0], "mask_token_id": 63, "markov_rank": 8}
    table = {
        "target": {"name": "toy"},
        "data": {"folders": ["data"], "sequence_length": 999},
        "training": {"output": "run", "steps": 1},
    }
    for family in families:
        dense = {"num_hidden_layers": 1} if family == "drafter" else {}
        table[family] = {**shared, **dense, **extra}
    with pytest.raises(ValueError, match=fault):
        from_table(table, TrainConfig, "run")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"target_layer_ids": (0, 1)}, r"\[deepseek_v4_drafter\]: target_layer_ids is \[0, 1\]; w"),
        ({"mask_token_id": 64}, r"\]: mask_token_id is 64; the embedding has rows 0 to 63"),
        ({"mask_token_id": 7}, r"\]: mask_token_id is 7, which also ends an answer"),
        ({"block_size": 0}, r"\]: block_size is 0; it must be at least 1"),
        ({"markov_rank": 0}, r"\]: markov_rank is 0; it must be at least 1"),
    ],
)
def test_a_section_that_does_not_fit_its_target_is_refused(runs, target, change, fault):
    run = run_in(runs / "refused")
    section = dataclasses.replace(run.deepseek_v4_drafter, **change)
    ending = dataclasses.replace(target, stop_token_ids=(7,))
    with pytest.raises(DrafterMismatch, match=fault):
        run_training(dataclasses.replace(run, deepseek_v4_drafter=section), ending)
    assert not (runs / "refused").exists()


def test_a_target_of_another_family_is_refused(runs, tiny_target):
    with pytest.raises(DrafterMismatch, match=r"llama_tiny has a DenseConfig: .* in \[drafter\]"):
        described_drafter(run_in(runs / "x"), tiny_target)


def test_a_drafter_of_another_family_is_no_beginning(folder, runs, target, tiny_run):
    dense = dataclasses.replace(
        tiny_run.drafter, target_layer_ids=(-1,), mask_token_id=63, markov_rank=8
    )
    run = run_in(runs / "refused", start_from=str(folder))
    with pytest.raises(ValueError, match="DeepseekV4DrafterConfig, the run describes a DrafterC"):
        run_training(dataclasses.replace(run, drafter=dense, deepseek_v4_drafter=None), target)
    longer = dataclasses.replace(run.deepseek_v4_drafter, block_size=5)
    with pytest.raises(ValueError, match="= 4, the run describes 5: change the section that"):
        run_training(dataclasses.replace(run, deepseek_v4_drafter=longer), target)


def test_an_evaluation_takes_it_teacher_forced(shipped, target):
    check_supported(target, shipped)


def test_a_dialect_that_cannot_express_it_is_refused(shipped, target, tmp_path):
    pair = target.config, target.weights
    with pytest.raises(ValueError, match="dialect 'deepspec' cannot express a DeepSeek-V4 drafter"):
        save_drafter(shipped.config, shipped.weights, tmp_path, pair, dialect="deepspec")


def test_the_shipped_config_fits_the_shipped_target_and_its_data():
    run = read_config(CONFIGS / "deepseek-v4-small-mtp.toml", TrainConfig)
    dense = read_config(CONFIGS / "deepseek-v4-small-dspark.toml", TrainConfig)
    assert (run.target, run.data) == (dense.target, dense.data)
    model = read_config(CONFIGS / "deepseek-v4-small.toml", PretrainConfig).model
    drafter = described_drafter(run, LoadedTarget(model, None, None, (), run.target.name))
    assert drafter.target_layer_ids[-1] == model.num_hidden_layers - 1


def test_the_section_describes_what_a_checkpoint_would(target):
    section = DeepseekV4DrafterSection(4, (-1, 0), 63, 32)
    assert family_of(CONFIG).drafter_config(section, target) == CONFIG
