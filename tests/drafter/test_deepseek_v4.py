"""The drafter of DeepSeek-V4: what it sees, what it says, and that decoding with it is exact."""

import dataclasses
import functools
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft
from dspark_jax.decode.session import Generator
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.drafter.deepseek_v4 import dspark
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.drafter.validate import DrafterMismatch
from dspark_jax.models.deepseek_v4 import hyper_connections as mhc
from dspark_jax.models.deepseek_v4.attention import project_out, project_query, project_row
from dspark_jax.models.deepseek_v4.moe import moe
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing.deepseek_v4 import save_pair, toy_config

WINDOW = 8
CONFIG = toy_config(num_hidden_layers=1, compress_ratios=(4,))
DRAFTER = DeepseekV4DrafterConfig(CONFIG, 4, (-1, 0), 63, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of both, as DeepSeek ships it."""
    path = tmp_path_factory.mktemp("v4")
    save_pair(path, DRAFTER)
    return path


@pytest.fixture(scope="module")
def target(folder: Path):
    return load_target(folder, "float32")


@pytest.fixture(scope="module")
def drafter(folder: Path, target):
    return load_drafter(folder, (target.config, target.weights))


def test_a_checkpoint_of_both_gives_each_its_own(target, drafter):
    assert target.config == CONFIG
    assert drafter.config == DRAFTER
    assert drafter.weights.main_proj.shape == (32, 64)
    assert len(drafter.weights.stages) == 2
    assert drafter.weights.confidence.shape == (64,)


@jax.jit
def naive_block(target_weights, weights, taps, anchor, start):
    """One block from the taps of a whole text, of which it may see ``start - 8 .. start - 1``."""
    config, length = CONFIG, taps.shape[0]

    def norm(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight

    main = norm(taps @ weights.main_proj.T, weights.main_norm)
    main_turn = phases(config, jnp.arange(length), compressed=False)
    turn = phases(config, start + jnp.arange(4), compressed=False)
    row = jnp.arange(length)
    seen_rows = (row < start) & (row >= start - WINDOW)
    visible = jnp.concatenate([seen_rows, jnp.ones(4, bool)])
    tokens = jnp.concatenate([anchor[None], jnp.full(3, 63)])
    streams = mhc.spread(config, target_weights.embed[tokens])
    for stage in weights.stages:
        seen, gates = mhc.read(config, stage.attention_mix, streams)
        x = norm(seen, stage.attention_norm)
        query = project_query(config, stage.attention, x, turn)[1]
        keys = jnp.concatenate(
            [
                project_row(config, stage.attention, main, main_turn),
                project_row(config, stage.attention, x, turn),
            ]
        )
        scores = jnp.where(visible, jnp.einsum("ghe,ke->ghk", query, keys) / 4, -jnp.inf)
        share = jnp.exp(scores)
        total = share.sum(axis=-1) + jnp.exp(stage.attention.sink)
        attended = jnp.einsum("ghk,ke->ghe", share, keys) / total[..., None]
        out = project_out(config, stage.attention, attended, turn)
        streams = mhc.write(gates, streams, out)
        seen, gates = mhc.read(config, stage.moe_mix, streams)
        x = norm(seen, stage.moe_norm)
        streams = mhc.write(gates, streams, moe(config, stage.moe, x, tokens, jnp.ones(4, bool)))
    return mhc.joined(config, weights.stream_head, streams)


commit = jax.jit(dspark.commit_context, static_argnums=0)
block = jax.jit(dspark.block_hidden, static_argnums=0)


def test_a_block_sees_the_last_window_of_committed_rows_and_all_of_itself(target, drafter):
    """Slots at different lengths: none, less than a window, more than one."""
    random = np.random.default_rng(0)
    lengths = np.array([0, 5, 21])
    taps = jnp.asarray(random.normal(size=(3, 21, 64)), jnp.float32)

    def committed(pieces):
        context = dspark.init_context(drafter.config, 3, 64, jnp.float32)
        width = 21 // pieces
        for begin in range(0, 21, width):
            position = jnp.tile(jnp.arange(begin, begin + width), 3)
            slot = jnp.repeat(jnp.arange(3), width)
            # a rejected row has no slot
            slot = jnp.where(position < jnp.repeat(lengths, width), slot, 3)
            rows = taps[:, begin : begin + width].reshape(-1, 64)
            context = commit(drafter.config, drafter.weights, context, rows, slot, position)
        return context

    context, at_once = committed(3), committed(1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), context, at_once)
    anchors, embed = jnp.array([3, 11, 40]), target.weights.embed
    found = block(drafter.config, drafter.weights, embed, context, anchors, jnp.asarray(lengths))
    for slot, length in enumerate(lengths):
        wanted = naive_block(
            target.weights, drafter.weights, taps[slot], anchors[slot], jnp.asarray(length)
        )
        np.testing.assert_allclose(found[slot], wanted, atol=1e-4)


def test_the_context_of_a_drafter_takes_its_window_however_long_the_text_may_be(drafter):
    config, window = drafter.config, drafter.config.target.sliding_window

    def rows(capacity):
        context = jax.eval_shape(lambda: dspark.init_context(config, 2, capacity, jnp.float32))
        assert {ring.shape[0] for ring in context.rings} == {2}
        return {ring.shape[1] for ring in context.rings}

    (least,) = rows(64)
    assert window <= least < 2 * window + 8
    assert rows(1_000_000) == {least}


def test_rows_without_a_slot_are_written_nowhere(drafter):
    context = dspark.init_context(drafter.config, 2, 64, jnp.float32)
    taps = jnp.ones((3, 64))
    slot, position = jnp.array([-1, 2, 0]), jnp.array([0, 0, -1])
    after = commit(drafter.config, drafter.weights, context, taps, slot, position)
    jax.tree.map(np.testing.assert_array_equal, context, after)


def test_the_confidence_reads_the_hidden_state_before_its_norm_and_the_previous_token(drafter):
    weights = drafter.weights
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32)), jnp.float32)
    previous = jnp.array([5, 9])
    bias, state = dspark.walk(drafter.config, weights, None, hidden, previous)
    confidence = dspark.confidences(drafter.config, weights, hidden, previous)
    embedding = weights.markov_w1[previous]
    np.testing.assert_allclose(bias, embedding @ weights.markov_w2.T, atol=1e-4)
    wanted = np.concatenate([hidden, embedding], axis=1) @ weights.confidence
    np.testing.assert_allclose(confidence, wanted, atol=1e-4)
    assert state is None
    # the logits read it after the norm: its scale does not tell
    once, twice = (
        dspark.base_logits(drafter.config, weights, jnp.eye(32), scale * hidden[:, None])
        for scale in (1.0, 2.0)
    )
    np.testing.assert_allclose(once, twice, atol=1e-4)


def test_greedy_drafts_are_the_same_where_no_logits_are_written(target, drafter, monkeypatch):
    config = StepConfig(target.config, drafter.config, "static", sampled=False, filtered=False)
    weights = Weights(target.weights, drafter.weights)
    state = init_state(config, slots=9, capacity=8, max_tokens=8, dtype=jnp.float32)
    state = state.replace(anchor=jnp.arange(9, dtype=jnp.int32))

    def run():
        return jax.jit(lambda: draft.__wrapped__(weights, state, None, 4, config=config))()

    plain = run()
    monkeypatch.setattr(dspark, "walks_without_logits", lambda *_: True)
    monkeypatch.delattr(dspark, "base_logits")
    silent = run()
    assert len(np.unique(plain.tokens)) > 9
    np.testing.assert_array_equal(silent.tokens, plain.tokens)
    np.testing.assert_allclose(silent.confidence, plain.confidence, rtol=1e-6)
    assert silent.scores is None


def test_many_greedy_requests_walk_without_logits_where_the_kernel_runs(monkeypatch):
    """At the widths of V4-Flash."""
    monkeypatch.setattr("pallas_kernels.best_linear.api.missing_hopper", lambda: None)

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def walks(slots, head, w2):
        return dspark.walks_without_logits(types.SimpleNamespace(markov_w2=w2), head, slots)

    head, w2 = of(129280, 4096), of(129280, 256)
    assert walks(205, head, w2)
    assert not walks(204, head, w2)
    assert not walks(205, of(129280, 4096, dtype=jnp.float32), w2)
    assert not walks(205, head, of(129280, 40))


@functools.partial(jax.jit, static_argnums=0)
def best_tokens(config, weights, texts):
    """What the target alone says after every token of whole texts."""
    family, (slots, length) = config.family, texts.shape
    cache = family.init_cache(config, slots, length, jnp.float32)
    rows = rectangle(texts, jnp.zeros(slots, jnp.int32), jnp.full(slots, length))
    hidden, _, _ = family.forward(config, weights, cache, rows, taps=())
    return jnp.argmax(family.unembed(config, weights, hidden), axis=-1).reshape(texts.shape)


def test_greedy_decoding_with_the_drafter_gives_the_tokens_of_the_target_alone(target, drafter):
    """Windows trimmed by a budget, drafts taken and refused, rings lapped more than once."""
    slots, width, answer = 4, 26, 30
    random = np.random.default_rng(2)
    prompts = random.integers(0, 63, (slots, width)).astype(np.int32)
    lengths = np.array([1, 7, 19, 26], np.int32)
    requests = make_requests(slots, max_new_tokens=answer, context=width + answer)

    config = StepConfig(target.config, drafter.config, "compact", sampled=False, filtered=False)
    costs = no_costs(slots, config.depth)
    verify = 1.0 + 0.06 * jnp.arange(costs.verify.shape[1], dtype=jnp.float32)
    costs = costs.replace(verify=verify[None], known=jnp.asarray(True))
    weights = Weights(target.weights, drafter.weights)
    drafted = loop.generate(
        weights, prompts, lengths, requests, costs, config=config, max_tokens=answer
    )
    assert (drafted.count == answer).all()
    texts = np.pad(prompts, ((0, 0), (0, answer)))
    for text, length, tokens in zip(texts, lengths, drafted.tokens, strict=True):
        text[length : length + answer] = tokens
    best = np.asarray(best_tokens(target.config, target.weights, texts))
    for said, length, tokens in zip(best, lengths, drafted.tokens, strict=True):
        np.testing.assert_array_equal(said[length - 1 : length - 1 + answer], tokens)
    # the test means nothing unless drafts were both taken and refused, in windows of many widths
    taken = np.arange(answer) < np.asarray(drafted.steps)[:, None]
    accepted, windows = (np.asarray(x)[taken] for x in (drafted.accepted, drafted.windows))
    assert (accepted > 0).sum() > 5
    assert (accepted < windows).sum() > 5
    assert len(set(windows)) > 2


def test_windows_that_the_targets_rings_cannot_take_back_are_refused():
    long = dataclasses.replace(DRAFTER, block_size=20)
    StepConfig(CONFIG, long, "static", k=15)
    with pytest.raises(ValueError, match=r"17 rows.* at most 16; wanted k of at most 15"):
        StepConfig(CONFIG, long, "static", k=16)
    StepConfig(CONFIG, long, "off")


def changed(folder, tmp_path, change):
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(raw, tensors)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("dspark_markov_rank", None, "config lacks dspark_markov_rank"),
        ("dspark_block_size", 4.5, r"dspark_block_size is 4\.5; wanted a whole number"),
        ("dspark_block_size", 0, "dspark_block_size is 0; it must be at least 1"),
        ("dspark_target_layer_ids", "12", "dspark_target_layer_ids is '12'; wanted a list"),
        ("dspark_target_layer_ids", [0, 1], r"\[0, 1\]; wanted distinct layers between -1 and 0"),
        (
            "dspark_noise_token_id",
            64,
            "id is 64; the embedding has rows 0 to 63",
        ),
        ("dspark_noise_token_id", 7, "dspark_noise_token_id is 7, which also ends an answer"),
        ("compress_ratios", [4, 0, 4], r"stages are \[0, 4\], wanted zeros"),
        ("model_type", "deepseek_v5", "model_type 'deepseek_v5' is not supported"),
    ],
)
def test_a_field_that_does_not_fit_is_named(target, folder, tmp_path, field, value, fault):
    path = changed(folder, tmp_path, lambda raw, _: raw.update({field: value}))
    with pytest.raises(ValueError, match=fault):
        load_drafter(path, (target.config, target.weights), stop_token_ids=(7,))


def test_a_drafter_of_another_target_is_refused(target, folder):
    other = dataclasses.replace(target.config, hidden_size=48, num_hidden_layers=9)
    with pytest.raises(
        DrafterMismatch, match=r"num_hidden_layers 1, the target has 9; .*hidden_size 32, .* 48"
    ):
        load_drafter(folder, (other, target.weights))


def test_a_session_with_another_target_than_it_was_loaded_for_is_refused(target, drafter):
    other = dataclasses.replace(target.config, num_hidden_layers=9)
    with pytest.raises(DrafterMismatch, match="num_hidden_layers 1, the target has 9"):
        Generator(dataclasses.replace(target, config=other), drafter)


def test_every_wrong_tensor_of_a_drafter_is_named_and_only_its_own(target, folder, tmp_path):
    def change(_, tensors):
        tensors["mtp.1.confidence_head.weight"] = tensors.pop("mtp.1.confidence_head.proj.weight")
        tensors["mtp.0.main_norm.weight"] = np.zeros(31, np.float32)
        del tensors["layers.0.attn_norm.weight"]

    path = changed(folder, tmp_path, change)
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load_drafter(path, (target.config, target.weights))
    message = str(caught.value)
    assert "missing tensors: mtp.1.confidence_head.proj.weight;" in message
    assert "unknown tensors: mtp.1.confidence_head.weight;" in message
    assert "mtp.0.main_norm.weight is [31], wanted [32]" in message
    assert "layers.0" not in message
