"""Every program is compiled once, however its results are bound to their device."""

import contextlib
import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

from dspark_jax.compiling import bound
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.engine.cost_profile import profile
from dspark_jax.engine.engine import Engine
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing import summing
from tests.engine.small import BLOCK, DRAFTER, SMALL, TARGET

REQUESTS = [
    Request(list(range(1, length)), SamplingParams(max_new_tokens=60)) for length in (2, 9, 40)
]


@contextlib.contextmanager
def compilations(caplog):
    """Names of the programs that any thread compiles here."""
    found = []
    caplog.clear()
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING, logger="jax"):
            yield found
    finally:
        jax.config.update("jax_log_compiles", False)
    found += re.findall(r"Finished XLA compilation of (\S+)", caplog.text)


@pytest.fixture
def lowered_before(monkeypatch):
    """The pair holds a function that was lowered before its programs, as kernels are on a GPU."""
    weight = jax.jit(summing._weight)

    def exported(position):
        shape = jax.ShapeDtypeStruct(position.shape, position.dtype)
        return export.export(weight)(shape).call(position)

    monkeypatch.setattr(summing, "_weight", exported)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_what_such_a_program_returns_is_bound_and_what_is_bound_is_not_copied(lowered_before):
    free = jax.jit(lambda: jnp.arange(3))()
    held = bound(free)
    assert not free.committed
    assert held.committed
    assert jax.jit(summing._weight)(free).committed
    assert held.unsafe_buffer_pointer() == free.unsafe_buffer_pointer()


def test_what_is_compiled_for_bound_shapes_is_found_by_bound_arrays(caplog):
    shape = bound(jax.ShapeDtypeStruct((3,), jnp.int32))
    held = bound(jnp.arange(3, dtype=jnp.int32))
    run = jax.jit(lambda x: x + 1)
    run.lower(shape).compile()
    with compilations(caplog) as found:
        run(held)
    assert found == []
    assert bound(shape).sharding is shape.sharding


def test_an_engine_compiles_its_programs_once_and_none_while_it_serves(lowered_before, caplog):
    costs = no_costs(SMALL.max_requests, BLOCK)
    verify = 1.0 + 0.3 * jnp.arange(costs.verify.shape[1], dtype=jnp.float32)
    costs = costs.replace(verify=verify[None], known=jnp.asarray(True))
    engine = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, cost_table=costs))
    with compilations(caplog) as warming:
        engine.warmup()
    programs = engine._programs
    count = sum(len(programs._shapes(4, pieces)) for pieces in (0, *programs.piece_tiers))
    assert count > 2
    assert warming.count("jit(_run)") == count
    with compilations(caplog) as serving:
        engine.generate(REQUESTS)
    assert serving == []


def test_a_session_compiles_nothing_while_it_serves(lowered_before, caplog):
    endless = dataclasses.replace(TARGET, stop_token_ids=())
    session = Generator(endless, DRAFTER, batch=2, max_context=200, mode="static", chunk_steps=4)
    session.warmup()
    with compilations(caplog) as serving:
        for request in REQUESTS:
            [answer] = session.generate([request])
            assert len(answer.commits) > 4
    assert serving == []


def test_a_profile_compiles_every_program_once(lowered_before, caplog):
    with compilations(caplog) as compiled:
        [tier] = profile(
            TARGET, DRAFTER, dataclasses.replace(SMALL, max_requests=2, batch_tiers=(2,))
        )["tiers"]
    assert compiled.count("jit(_verify)") == len(tier["verify"]["tokens"]) > 1
    assert compiled.count("jit(_draft)") == len(tier["walk"]["depths"]) > 1
