"""Seen step times correct a cost table slowly, and tell apart what costs more from what hiccups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.engine.cost_correction import CostCorrection
from dspark_jax.engine.figures import as_json
from dspark_jax.engine.flight import Flight
from dspark_jax.schedule.cost import no_costs
from tests.engine.small import BLOCK, VOCAB

LANES, BUCKETS = 4, (4, 8, 12)
VERIFY, DRAFT = np.array([1.0, 1.5, 2.0]), 0.4
PROGRAM = (LANES, 0)


def table(verify=VERIFY, draft=DRAFT, buckets=BUCKETS):
    """Costs by bucket, laid out by rows as an engine reads them."""
    plain = no_costs(LANES, BLOCK)
    rows = np.searchsorted(buckets, np.arange(plain.verify.shape[1]))
    return plain.replace(
        verify=jnp.asarray(np.asarray(verify)[rows], jnp.float32)[None],
        draft=jnp.full_like(plain.draft, draft),
        known=jnp.asarray(True),
    )


class Machine:
    """Buckets and drafts that cost so much more than the table says, and a correction of it."""

    def __init__(self, *slower, draft=1.0):
        self.slower, self.draft = np.array(slower), draft
        self.used = []
        costs = {PROGRAM: jax.device_get(table())}
        self.correction = CostCorrection(
            lambda: costs, lambda _: BUCKETS, lambda *new: self.used.append(new)
        )

    def run(self, *steps, hiccup=1.0):
        """A dispatch of steps by bucket; all of them draft."""
        verify = np.bincount(steps, minlength=3) * VERIFY
        draft = len(steps) * DRAFT
        seconds = hiccup * (verify @ self.slower + draft * self.draft)
        self.correction.observe(PROGRAM, verify, draft, seconds)

    @property
    def found(self):
        """Factors in use, by name."""
        return {
            name.removeprefix("4x").removesuffix("+0"): factor
            for name, factor in self.correction.factors().items()
        }


def test_a_bucket_that_is_slower_than_measured_is_found_among_noise_and_hiccups():
    machine, random = Machine(1.0, 1.5, 1.0), np.random.default_rng(0)
    for _ in range(2000):
        noise = np.exp(0.05 * random.normal()) * (50 if random.uniform() < 0.02 else 1)
        # neighbouring steps of a dispatch mostly run in one bucket
        steps = np.clip(random.integers(0, 3) + (random.uniform(size=8) < 0.1), 0, 2)
        machine.run(*steps, hiccup=noise)
    found = machine.found
    assert found["8"] == pytest.approx(1.5, rel=0.06)
    assert [found["4"], found["12"]] == pytest.approx([1, 1], rel=0.06)
    assert found["draft"] == pytest.approx(1, rel=0.12), "it is never seen alone"
    program, tables = machine.used[-1]
    assert program == PROGRAM
    scaled = VERIFY * [found[str(rows)] for rows in BUCKETS]
    levelled = np.maximum.accumulate(scaled)
    np.testing.assert_allclose(tables.verify[0, [0, 4, 5, 8, 9, 12]], levelled.repeat(2), rtol=1e-5)
    np.testing.assert_allclose(tables.draft, DRAFT * found["draft"], rtol=1e-5)
    assert (tables.verify.dtype, tables.draft.dtype) == (np.float32, np.float32)


def test_a_slow_machine_changes_no_comparison_with_what_it_has_not_run():
    machine = Machine(1.5, 1.5, 1.5, draft=1.5)
    for _ in range(400):
        machine.run(0)
    tables = machine.used[-1][1]
    assert machine.found.keys() == {"4", "draft"}, "the others have not been seen"
    np.testing.assert_allclose(tables.verify, 1.5 * table().verify, rtol=0.05)
    np.testing.assert_allclose(tables.draft, 1.5 * DRAFT, rtol=0.1)


def test_one_hiccup_makes_no_new_table():
    machine = Machine(1.0, 1.0, 1.0)
    for hiccup in (1, 1, 50, 1, 1):
        machine.run(0, 1, hiccup=hiccup)
    assert machine.used == []


def test_what_was_dear_and_is_run_no_more_is_not_dear_for_ever():
    machine = Machine(1.0, 1.0, 3.0)
    for step in range(3000):
        machine.run(step % 3)
    assert machine.found["12"] == pytest.approx(3, rel=0.1)
    for _ in range(8000):
        machine.run(0)
    assert machine.found["12"] < 1.2
    assert machine.found["4"] == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(("slower", "limit"), [(100.0, 4.0), (0.01, 0.25)])
def test_factors_are_bounded(slower, limit):
    machine = Machine(slower, slower, slower, draft=slower)
    for _ in range(400):
        machine.run(0, 1, 2)
    assert list(machine.found.values()) == pytest.approx([limit] * 4, rel=0.02)


SMALL, FULL = 4, 12
"""The buckets of the engine: every anchor alone, and full windows."""
SHARED = SamplingParams(temperature=1.0)
"""Programs that the engine's own tests compile too; greedy requests use them as well."""


@pytest.fixture(scope="module")
def serve(make_engine):
    """Answers of an engine, and its figures, on a machine whose full windows take ``slower``."""
    costs = table((1.0, 1.3), draft=0.1, buckets=(SMALL, FULL))

    def wait(flight, clock, machine):
        jax.block_until_ready(flight.launched.result())
        for leg in flight.legs:
            verification = 1.3 * machine["slower"] if leg.shape.rows > SMALL else 1.0
            seconds = verification + 0.1 * (leg.shape.depth > 0)
            machine["dispatches"] += 1
            hiccup = 50 if machine["dispatches"] == machine["hiccup"] else 1
            machine["now"] += leg.steps * seconds * hiccup
            leg.ended, leg.waited, leg.ahead = machine["now"], True, True

    def run(*, slower=1.0, hiccup=None, count=300, **changes):
        machine = {"now": 0.0, "dispatches": 0, "slower": slower, "hiccup": hiccup}
        engine = make_engine(cost_table=costs, **changes)
        engine.warmup(SHARED)
        engine._metrics.clock = lambda: machine["now"]
        random = np.random.default_rng(0)
        # For a batch of one-token answers nothing can be drafted: both shapes are seen.
        lengths = itertools.cycle([24] * 8 + [1] * 8)
        requests = [
            Request([int(random.integers(VOCAB))], SamplingParams(max_new_tokens=next(lengths)))
            for _ in range(count)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flight, "wait", lambda flight, clock: wait(flight, clock, machine))
            with jax.no_tracing(), jax.transfer_guard("disallow"):
                answers = engine.generate(requests)
        return answers, as_json(engine.figures())

    return run


def mean_window(answers):
    long = [answer for answer in answers if len(answer.token_ids) > 1]
    return np.mean([window for answer in long for window in answer.windows])


def test_an_engine_learns_what_its_buckets_cost_without_a_new_trace(serve):
    answers, figures = serve(slower=2.5, correct_costs=True)
    factors = figures["cost_factor"]
    assert factors["4x12+0"] > 1.6 * factors["4x4+0"]
    assert mean_window(answers[-40:]) < 0.7 * mean_window(answers[:10])
    left, untouched = serve(slower=2.5, correct_costs=False)
    assert untouched["cost_factor"] == {}
    assert mean_window(left[-40:]) > 0.9 * mean_window(left[:10])


def test_one_hiccup_changes_no_decision(serve):
    plain, _ = serve(count=40, correct_costs=True)
    shaken, figures = serve(count=40, correct_costs=True, hiccup=20)
    assert (
        figures["step_seconds"]["sum"] > 1.2 * sum(len(answer.commits) for answer in plain) / LANES
    ), "there was a hiccup"
    assert shaken == plain, "windows included"


@pytest.mark.parametrize(("waited", "ahead"), [(False, True), (True, False)])
def test_a_dispatch_that_is_read_or_launched_late_teaches_nothing(
    make_engine, monkeypatch, waited, ahead
):
    engine = make_engine(cost_table=table(), correct_costs=True)
    engine.warmup(SHARED)

    def late(flight, clock):
        jax.block_until_ready(flight.launched.result())
        for leg in flight.legs:
            leg.ended, leg.waited, leg.ahead = clock() + 5.0, waited, ahead

    monkeypatch.setattr(Flight, "wait", late)
    engine.generate([Request([1], SamplingParams(max_new_tokens=20))])
    figures = as_json(engine.figures())
    assert figures["cost_factor"] == {}
    assert figures["steps_total"] > 0
