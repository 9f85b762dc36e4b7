"""What an engine costs beside its step."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from benchmarks.overheads import endless, engine_step, generator_step
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.engine.engine import Engine
from tests.engine.small import SMALL, STOP, TARGET


def asked(tokens):
    return [Request([1, 2 + index], SamplingParams(max_new_tokens=tokens)) for index in range(2)]


def reading(monkeypatch, seconds):
    clock = SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr("benchmarks.overheads.time", clock)


def test_a_step_of_an_engine_is_timed_while_nobody_joins_or_ends(monkeypatch):
    config = dataclasses.replace(SMALL, mode="off", max_requests=2, batch_tiers=(2,))
    engine = Engine(endless(TARGET), None, config)
    reading(monkeypatch, itertools.count(step=6.0))
    assert engine_step(engine, asked(57)) == 6.0 / SMALL.steps
    assert not engine.busy
    with pytest.raises(RuntimeError, match="wanted longer ones"):
        engine_step(engine, asked(6))


def test_a_step_of_a_generator_is_the_difference_of_two_lengths(monkeypatch):
    generator = Generator(endless(TARGET), mode="off", batch=2, max_context=32)
    reading(monkeypatch, iter([0.0, 3.0, 10.0, 21.0]))
    assert generator_step(generator, asked, 4, 12) == (11.0 - 3.0) / (12 - 4)


def test_an_endless_target_says_what_would_have_stopped_it():
    plain = Generator(TARGET, mode="off", batch=2, max_context=60).generate(asked(50))
    longer = Generator(endless(TARGET), mode="off", batch=2, max_context=60).generate(asked(50))
    assert any(one.token_ids[-1] == STOP for one in plain)
    assert [len(one.token_ids) for one in longer] == [50, 50]
