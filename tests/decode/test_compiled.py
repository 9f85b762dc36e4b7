"""What the compiled program does and does not contain, on a small real pair."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.decode.state import init_state, make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.engine import lanes
from dspark_jax.models.pages import PagePool
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing import markov
from pallas_kernels import choice


@pytest.fixture(scope="module")
def pair(make_pair):
    """Short blocks: the walk is unrolled, and long ones only take longer to compile."""
    return make_pair(block_size=3)


@pytest.fixture(scope="module")
def shallow(make_pair):
    """One layer, where not the caches of layers are looked at but what is called."""
    layers = {"num_hidden_layers": 1, "num_target_layers": 1, "target_layer_ids": (-1,)}
    return make_pair(block_size=3, **layers)


run_steps = jax.jit(loop.run_steps, static_argnames="config", donate_argnums=1)
admit = jax.jit(loop.admit)
new_state = jax.jit(
    init_state, static_argnames=("config", "slots", "capacity", "max_tokens", "dtype")
)


def step_config(pair, mode, slots, sampled, **changes):
    return StepConfig(
        pair.target,
        None if mode == "off" else pair.drafter,
        mode,
        buckets=(slots, 4 * slots) if mode == "compact" else (),
        walk_caps=(1, 3) if mode in ("compact", "cap-accept") else (),
        sampled=sampled,
        filtered=sampled,
        **changes,
    )


def started(pair, config, slots):
    """A state in which every slot decodes."""
    state = new_state(config, slots=slots, capacity=100, max_tokens=32, dtype=jnp.float32)
    requests = make_requests(
        slots,
        temperature=0.8 if config.sampled else 0.0,
        max_new_tokens=32,
        context=100,
    )
    every = np.arange(slots, dtype=np.int32)
    return admit(state, every, 3 + every, requests)


def costs(pair, slots):
    """A table, so that budgets are searched."""
    plain = no_costs(slots, pair.drafter.block_size)
    verify = 1.0 + 0.1 * jnp.arange(plain.verify.shape[1], dtype=jnp.float32)
    return plain.replace(verify=verify[None], known=jnp.asarray(True))


def compiled(pair, config, slots):
    state = started(pair, config, slots)
    steps = jnp.asarray(6, jnp.int32)
    args = (pair.weights, state, costs(pair, slots), steps)
    return run_steps.lower(*args, config=config).compile(), args


def copies(text, arrays):
    """Copies of arrays of these shapes, wherever they stand in a compiled text."""
    shapes = {"f32[" + ",".join(map(str, array.shape)) + "]" for array in arrays}
    found = re.findall(r"= \(?(f32\[[\d,]+\])\S* (?:copy|copy-start)\(", text)
    return [shape for shape in found if shape in shapes]


def cache_arrays(state):
    arrays = [*state.cache.keys, *state.cache.values]
    if state.context is not None:
        arrays += [*state.context.keys, *state.context.values]
    return arrays


@pytest.mark.parametrize(
    ("slots", "sampled"), [(1, False), (4, True)], ids=["1-greedy", "4-sampled"]
)
@pytest.mark.parametrize("mode", ["off", "static", "compact", "cap-accept"])
def test_steps_copy_no_cache_and_never_turn_to_the_host(pair, mode, slots, sampled):
    program, (weights, state, tables, steps) = compiled(
        pair, step_config(pair, mode, slots, sampled), slots
    )
    text = program.as_text()
    arrays = cache_arrays(state)
    assert " while(" in text
    assert copies(text, arrays) == []
    for word in ("callback", "infeed", "outfeed", "send(", "recv("):
        assert word not in text
    donated = jax.tree.leaves(state)
    with jax.transfer_guard("disallow"):
        state = program(weights, state, tables, steps)
    assert all(buffer.is_deleted() for buffer in donated)
    assert state.steps.tolist() == [6] * slots


def test_a_step_of_a_few_lanes_with_prompts_copies_no_pool_of_pages(pair):
    one_bucket = {"buckets": (8,), "walk_caps": (3,)}
    config = dataclasses.replace(step_config(pair, "compact", 2, False), **one_bucket)
    pool = PagePool(count=13, size=8, columns=4)
    state = lanes.start(config, slots=4, pool=pool, context=32, dtype=jnp.float32, stop_width=1)
    two = lanes.Lanes(jnp.arange(2), jnp.ones(2, bool), jnp.zeros((2, 4), jnp.int32))
    ones = jnp.ones(3, jnp.int32)
    pieces = lanes.Pieces(jnp.zeros((3, 5), jnp.int32), ones, ones, ones)
    run = jax.jit(lanes.run, static_argnames=("config", "steps"), donate_argnums=1)
    args = (pair.weights, state, costs(pair, 2), two, pieces)
    text = run.lower(*args, config=config, steps=1).compile().as_text()
    assert copies(text, cache_arrays(state)) == []


def test_a_state_that_is_not_donated_is_seen_to_be_copied(pair):
    """The search for copies can fail."""
    config = step_config(pair, "static", 4, False)
    state = started(pair, config, 4)
    args = (pair.weights, state, costs(pair, 4), jnp.asarray(6))
    kept = jax.jit(loop.run_steps, static_argnames="config")
    text = kept.lower(*args, config=config).compile().as_text()
    assert copies(text, cache_arrays(state))


def test_a_host_callback_is_seen(pair, monkeypatch):
    """The search for host callbacks can fail."""
    plain = loop.decode_step

    def chatty(weights, state, tables, *, config):
        jax.debug.callback(lambda tick: None, state.tick)
        return plain(weights, state, tables, config=config)

    monkeypatch.setattr(loop, "decode_step", chatty)
    # a lag of its own keeps this trace apart from the true step's
    program, _ = compiled(pair, step_config(pair, "off", 4, False, lag=2), 4)
    assert "callback" in program.as_text()


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_a_mixed_workload_traces_nothing_after_warm_up(shallow, mode):
    target = LoadedTarget(shallow.target, shallow.weights.target, None, (5,), "tiny")
    drafter = LoadedDrafter(shallow.drafter, shallow.weights.drafter, "tiny-drafter")
    # more buckets are only more to compile
    buckets = (3, 12) if mode == "compact" else None
    session = Generator(
        target, drafter, mode=mode, batch=3, max_context=96, chunk_steps=4, buckets=buckets
    )
    sampled = SamplingParams(temperature=0.9, top_k=9)
    session.warmup()
    session.warmup(sampled)
    random = np.random.default_rng(0)

    def ask(length, **params):
        return Request(random.integers(0, 96, length).tolist(), SamplingParams(**params))

    greedy = [ask(n, max_new_tokens=m) for n, m in ((1, 1), (2, 30), (50, 7), (95, 9))]
    greedy.append(ask(40, max_new_tokens=20, stop_token_ids=(1, 2, 3)))
    mixed = [
        ask(9, temperature=0.3, top_k=5, max_new_tokens=11, seed=1),
        ask(70, max_new_tokens=5),
        ask(33, temperature=1.5, top_p=0.7, max_new_tokens=30, stop_token_ids=(7,)),
        ask(3, temperature=0.9, max_new_tokens=2),
    ]
    with jax.no_tracing():
        answers = session.generate(greedy) + session.generate(mixed) + session.generate(greedy[:1])
    assert all(answer.token_ids for answer in answers)


def test_generate_works_inside_jit_and_vmap(shallow):
    config = step_config(shallow, "compact", 1, True)
    config = dataclasses.replace(config, buckets=(), walk_caps=(), filtered=False)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 96, (4, 6)), jnp.int32)
    lengths = jnp.asarray([6, 1, 3, 5], jnp.int32)

    def answer(prompt, length, seed):
        requests = make_requests(1, temperature=0.7, seed=seed, max_new_tokens=9, context=15)
        return loop.generate(
            shallow.weights,
            prompt[None],
            length[None],
            requests,
            costs(shallow, 1),
            config=config,
            max_tokens=9,
        ).tokens[0]

    seeds = jnp.arange(4)
    alone = [answer(*row) for row in zip(prompts, lengths, seeds, strict=True)]
    mapped = jax.jit(jax.vmap(answer))(prompts, lengths, seeds)
    np.testing.assert_array_equal(mapped, jnp.stack(alone))


def test_vmapped_answers_run_the_kernels_of_a_gpu(make_pair, monkeypatch):
    """Lowered for an H200 that is not there."""
    hopper = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(
        "pallas_kernels.hopper.jax", types.SimpleNamespace(devices=lambda: [hopper])
    )
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "num_attention_heads": 2}
    pair = make_pair(num_hidden_layers=1, num_key_value_heads=1, vocab_size=256, **sizes)
    weights = jax.eval_shape(
        lambda target: Weights(
            jax.tree.map(lambda x: x.astype(jnp.bfloat16), target),
            markov.MarkovDrafterWeights(jnp.zeros((256, 256)), jnp.zeros((3, 256))),
        ),
        pair.weights.target,
    )
    config = StepConfig(
        pair.target, markov.MarkovDrafterConfig(256, 3), "compact", sampled=False, filtered=False
    )

    def answer(weights, prompt, length):
        requests = make_requests(1, max_new_tokens=58, context=64)
        costs = no_costs(1, config.depth)
        return loop.generate(
            weights, prompt[None], length[None], requests, costs, config=config, max_tokens=58
        ).tokens[0]

    operands = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 6), (4,))]
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    kernels = {"paged_attention": "mosaic", "best_linear": "mosaic", "top_b": "triton"}
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        choice.preferring(**kernels),
    ):
        traced = jax.jit(jax.vmap(answer, (None, 0, 0))).trace(weights, *operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in (*kernels, "row_linear", "rope_write", "ragged_pack"):
        assert name in text


def test_a_batch_that_has_ended_takes_no_step(pair):
    config = step_config(pair, "static", 4, False)
    state = started(pair, config, 4)
    state = dataclasses.replace(state, active=jnp.zeros(4, bool))
    ended = run_steps(pair.weights, state, costs(pair, 4), jnp.asarray(6), config=config)
    assert ended.tick == 0


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_a_step_that_records_no_confidences_holds_nothing_of_the_recording(
    shallow, mode, monkeypatch
):
    def lowered(**changes):
        config = step_config(shallow, mode, 4, True, **changes)
        config = dataclasses.replace(config, buckets=(), walk_caps=(), filtered=False)
        state = started(shallow, config, 4)
        args = (shallow.weights, state, costs(shallow, 4), jnp.asarray(6))
        # a function of its own: the cache of traces does not know what is patched
        run = jax.jit(lambda *args: loop.run_steps(*args, config=config))
        return run.lower(*args)

    plain = lowered()
    log = "tensor<4x32x3xf32>"
    assert log not in plain.as_text()
    assert log in lowered(record_confidences=True).as_text()
    monkeypatch.setattr("dspark_jax.decode.step._log_confidences", lambda state, drafts: None)
    assert lowered().as_text() == plain.as_text()
