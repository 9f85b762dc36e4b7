"""A DeepSeek-V4 pair behind an engine: rings go with a slot, entries lie in pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine
from dspark_jax.models.deepseek_v4.ring import SCRATCH
from dspark_jax.models.ragged import rectangle
from dspark_jax.testing.deepseek_v4 import save_pair, toy_config

VOCAB, BLOCK, CONTEXT, SLOTS = 64, 2, 64, 4
STEP_ROWS = 24
"""Rows of prompts in a step, in two pieces: more than a ring has room for beside its history."""
SMALL = EngineConfig(
    max_requests=SLOTS,
    mode="compact",
    threshold=0.15,
    max_context=CONTEXT,
    page_size=4,
    pages=17,
    prompt_width=STEP_ROWS // 2,
    max_batched_tokens=SLOTS * (BLOCK + 1) + STEP_ROWS,
    # a dispatch of fewer than all has other lanes than slots
    batch_tiers=(SLOTS - 1, SLOTS),
    token_tiers=(),
    steps=2,
    correct_costs=False,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One layer, as compiling takes most of the time here, and a drafter of one stage."""
    folder = tmp_path_factory.mktemp("v4")
    config = toy_config(num_hidden_layers=1, compress_ratios=(4,))
    save_pair(folder, DeepseekV4DrafterConfig(config, BLOCK, (0,), VOCAB - 1, 32))
    target = load_target(folder, "float32")
    return target, load_drafter(folder, (target.config, target.weights))


@pytest.fixture(scope="module")
def requests():
    """Prompts that one step reads or two, the last of which begins like the first."""
    random = np.random.default_rng(0)
    lengths = (42, 18, 24, 1, 45, 16)
    prompts = [random.integers(0, VOCAB - 1, length).tolist() for length in lengths]
    prompts.append(prompts[0][:32] + prompts[1][:8])
    answers = random.integers(8, 16, len(prompts)).tolist()
    return [
        Request(prompt, SamplingParams(max_new_tokens=count))
        for prompt, count in zip(prompts, answers, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def next_tokens(config, weights, tokens, lengths):
    """What the target alone says after every token of whole texts."""
    family, slots = config.family, tokens.shape[0]
    cache = family.init_cache(config, slots, CONTEXT, jnp.float32)
    rows = rectangle(tokens, jnp.zeros_like(lengths), lengths)
    hidden, _, _ = family.forward(config, weights, cache, rows, taps=())
    return jnp.argmax(family.unembed(config, weights, hidden), axis=-1).reshape(tokens.shape)


def check_greedy(target, requests, answers):
    """Every token of an answer is what the target says after the text before it."""
    tokens, lengths = np.zeros((len(requests), CONTEXT), np.int32), []
    for row, request, answer in zip(tokens, requests, answers, strict=True):
        assert len(answer.token_ids) == request.params.max_new_tokens
        text = [*request.prompt, *answer.token_ids]
        row[: len(text)] = text
        lengths.append(len(text))
    said = next_tokens(target.config, target.weights, tokens, np.array(lengths, np.int32))
    for row, request, answer in zip(np.asarray(said), requests, answers, strict=True):
        begin = len(request.prompt) - 1
        assert row[begin : begin + len(answer.token_ids)].tolist() == list(answer.token_ids)


def serve(engine, requests, together):
    """Answers of requests that join a running batch one by one, as soon as there is room."""
    names, found = [], {}
    for _ in range(1_000):
        if len(names) < len(requests) and len(names) - len(found) < together:
            names.append(engine.add(requests[len(names)]))
        found |= engine.step()
        if len(found) == len(requests):
            return [found[name] for name in names]
    raise AssertionError("the engine does not come to an end")


def test_greedy_answers_are_those_of_the_target_alone(pair, requests):
    """Requests come and go, prompts are read in pieces, pages run out and answers begin again."""
    assert STEP_ROWS > SCRATCH
    engine = Engine(*pair, SMALL)
    pages = engine.free_pages
    answers = serve(engine, requests, SLOTS - 1)
    check_greedy(pair[0], requests, answers)
    assert engine.preemptions > 0, "the pool was never full"
    assert engine.reused_rows == 0, "the last one took over pages without rings"
    assert engine.free_pages == pages
    windows, accepted = ([getattr(one, of) for one in answers] for of in ("windows", "accepted"))
    assert sum(map(sum, windows)) > sum(map(sum, accepted)) > len(requests)
    assert {window for answer in windows for window in answer} == set(range(BLOCK + 1))
    one_by_one = serve(engine, requests, 1)
    assert [answer.accepted for answer in one_by_one] == accepted, "other rings, other drafts"


def test_pages_that_do_not_hold_a_whole_text_are_not_kept_for_others(pair):
    target, drafter = pair
    with pytest.raises(
        ValueError,
        match=r"prefix_reuse is True; wanted None or False: target \S+ keeps rings of raw rows and "
        "of compressor states beside its pages",
    ):
        Engine(target, drafter, dataclasses.replace(SMALL, prefix_reuse=True))


def test_pages_that_entries_do_not_fit_are_refused(pair):
    with pytest.raises(
        ValueError, match=r"page_size is 6, entries stand for \[4\] tokens; .* of 4 a multiple"
    ):
        Engine(*pair, dataclasses.replace(SMALL, page_size=6))
