"""What a dispatch drafts and verifies: shapes that are compiled, and the choice among them."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.config import Shape
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.figures import as_json
from dspark_jax.engine.shapes import ShapeChoice, every_shape, extremes, paying_shapes
from dspark_jax.schedule.budget import Load, best_budget
from dspark_jax.schedule.cost import no_costs
from tests.engine.small import BLOCK, DRAFTER, SMALL, TARGET

DEPTHS = (1, 2, 3, 5, 7)
BATCH, DEPTH = 8, 7


def costs(batch=BATCH, depth=DEPTH, *, base=1.0, a_row=0.02, drafting=0.4, contexts=(0.0,)):
    """Seconds on a straight line; a walk takes from half of ``drafting`` to all of it."""
    plain = jax.device_get(no_costs(batch, depth))
    verify = base + a_row * np.arange(batch * (depth + 1) + 1, dtype=np.float32)
    return plain.replace(
        verify=np.stack([verify * (1 + context) for context in contexts]),
        draft=np.full((len(contexts), batch + 1), drafting, np.float32),
        walk=np.linspace(0.5, 1.0, depth).astype(np.float32),
        contexts=np.asarray(contexts, np.float32),
        known=np.asarray(True),
    )


def choice_of(known, room=100, rows=10, **changes):
    """A choice that has just measured these confidences, fully trusting its last step."""
    slots, depth = known.shape
    step = SimpleNamespace(
        **{"depth": depth, "lag": 1, "smoothing": 1.0, "hysteresis": 0.0} | changes
    )
    choice = ShapeChoice(slots, step)
    choice.learn(
        range(slots), range(slots), report(known), *np.broadcast_to([[room], [rows]], (2, slots))
    )
    return choice


def report(*confidences, depth=None):
    """Of a dispatch that measured these, a step each."""
    values = np.stack(confidences).astype(np.float32)
    depth = values.shape[2] if depth is None else depth
    decision = SimpleNamespace(confidence=values, depth=np.full(len(values), depth))
    outcome = SimpleNamespace(count=np.ones(values.shape[:2], int), decision=decision)
    return SimpleNamespace(outcome=outcome)


def test_every_row_count_has_a_depth_that_leaves_a_choice():
    assert every_shape((8, 16, 24, 32, 48, 64), 8, DEPTHS) == (
        Shape(0, 8),
        Shape(2, 16),
        Shape(3, 24),
        Shape(5, 32),
        Shape(7, 48),
        Shape(7, 64),
    )
    assert every_shape((3, 8), 1, DEPTHS) == (Shape(0, 1), Shape(2, 3), Shape(7, 8))
    assert every_shape((20,), 10, (1,)) == (Shape(0, 10), Shape(1, 20))


def paying(**prices):
    return paying_shapes(every_shape((16, 32, 64), BATCH, DEPTHS), BATCH, DEPTHS, costs(**prices))


def test_shapes_that_save_next_to_nothing_are_left_out():
    shapes = every_shape((16, 32, 64), BATCH, DEPTHS)
    assert paying(a_row=0.0, drafting=0.0) == extremes(shapes)
    assert paying(a_row=0.02) == shapes
    # 64 rows cost 1.064 + 0.1; 32 rows walked to 5 save 4 %, 16 rows walked to 2 save 8 %
    assert paying(a_row=0.001, drafting=0.1) == (*shapes[:2], shapes[3])


def test_a_walk_beyond_an_even_share_is_cut_where_it_is_dear():
    deep, shallow = (paying(drafting=drafting)[1:3] for drafting in (0.4, 5.0))
    assert deep == (Shape(2, 16), Shape(5, 32))
    # 16 rows cost 1.32 + 2.5 walked once, 0.42 more for every position: one is above a tenth
    assert shallow == (Shape(1, 16), Shape(3, 32))


@pytest.mark.parametrize(
    ("trust", "a_row", "best"),
    [
        (0.99, 0.0, Shape(7, 64)),  # rows are free
        (0.8, 0.02, Shape(7, 48)),
        (0.8, 0.05, Shape(5, 32)),
        (0.6, 0.02, Shape(3, 24)),
        (0.05, 0.02, Shape(0, 8)),  # drafting does not pay
    ],
)
def test_the_shape_of_highest_expected_throughput_is_taken(trust, a_row, best):
    choice = choice_of(np.full((BATCH, DEPTH), trust))
    shapes = every_shape((8, 16, 24, 32, 48, 64), BATCH, DEPTHS)
    assert choice.choose(shapes, BATCH, costs(a_row=a_row), range(BATCH)) == best


@pytest.mark.parametrize("users", [513, 1024, 1500])
@pytest.mark.parametrize("a_row", [0.0005, 0.001, 0.002, 0.004])
def test_of_very_many_requests_some_stand_for_all(users, a_row, monkeypatch):
    random = np.random.default_rng(users)
    trust = random.uniform(0.2, 1.0, (users, 1))
    choice = choice_of(trust ** random.uniform(0.5, 2.0, (users, DEPTH)))
    shapes = every_shape([users * rows for rows in (2, 3, 4, 6, 8)], users, DEPTHS)
    prices = costs(users, a_row=a_row)
    calls = []
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda x, k: calls.append(x.size) or partition(x, k))
    found = choice.choose(shapes, users, prices, range(users))
    assert 0 < max(calls) <= 512 * DEPTH
    monkeypatch.setattr("dspark_jax.engine.shapes.MOST_REQUESTS", users)
    choice._last.clear()
    assert found == choice.choose(shapes, users, prices, range(users))


def test_a_host_that_takes_longer_than_the_device_wants_the_most_tokens():
    choice = choice_of(np.full((BATCH, DEPTH), 0.6))
    shapes = every_shape((8, 16, 24, 32, 48, 64), BATCH, DEPTHS)
    rows = [
        choice.choose(shapes, BATCH, costs(a_row=0.05), range(BATCH), least=least).rows
        for least in (0.0, 3.0, 10.0)
    ]
    assert rows == sorted(set(rows))
    assert rows[-1] == shapes[-1].rows


@pytest.mark.parametrize("a_row", [0.02, 0.06])
def test_prompts_that_ride_along_make_no_draft_cheaper(a_row):
    choice = choice_of(np.full((BATCH, DEPTH), 0.6))
    shapes = every_shape((8, 16, 24, 32, 48, 64), BATCH, DEPTHS)
    beside = costs(base=20.0, a_row=a_row)
    by_rate = choice.choose(shapes, BATCH, beside, range(BATCH), prefilling=1)
    wanted = choice.choose(shapes, BATCH, costs(a_row=a_row), range(BATCH))
    assert by_rate.rows > wanted.rows, "no pace is known before anybody decodes alone"
    assert choice.choose(shapes, BATCH, beside, range(BATCH), prefilling=1) == wanted
    # a token is worth what it costs when everybody decodes, though only one does now
    for others in (range(1), range(BATCH)):
        choice.choose(shapes, BATCH, costs(a_row=a_row), others)
    assert choice.choose(shapes, BATCH, beside, [0], prefilling=BATCH) == shapes[0]


@pytest.mark.parametrize("batch", [6, 1024])
@pytest.mark.parametrize("seed", range(6))
def test_no_shape_promises_more_than_the_chosen_one(seed, batch):
    """Against the budget of the step, asked for the drafts that fit into each shape."""
    rng = np.random.default_rng(seed)
    known = rng.uniform(0.2, 1.0, (batch, DEPTH)).astype(np.float32)
    room = rng.integers(1, 12, batch)
    slots = np.flatnonzero(rng.random(batch) < 0.7)
    slots = slots if len(slots) else np.arange(1)
    a_row = float(rng.uniform(0, 0.6)) / batch
    prices = costs(batch, a_row=a_row, contexts=(0.0, 50.0 * batch))
    shapes = every_shape([batch * part for part in (1, 2, 4, 6, 8)], batch, DEPTHS)
    choice = choice_of(known)
    for slot in range(batch):
        choice._room[slot], choice._rows[slot] = room[slot], 3
    chosen = choice.choose(shapes, batch, prices, slots)

    survival = np.cumprod(known[slots], axis=1)
    valid = np.arange(1, DEPTH + 1) < room[slots][:, None]
    promised = {}
    for shape in shapes:
        usable = np.where(valid & (np.arange(DEPTH) < shape.depth), survival, 0.0)
        best = np.sort(usable, axis=None)[::-1][: shape.rows - len(slots)]
        seconds = np.interp(3 * len(slots), prices.contexts, prices.verify[:, shape.rows])
        if shape.depth:
            seconds += 0.4 * prices.walk[shape.depth - 1]
        promised[shape] = (len(slots) + best.sum()) / seconds
    assert promised[chosen] == pytest.approx(max(promised.values()), rel=1e-6)


def test_full_rows_promise_what_the_budget_of_a_step_promises():
    known = np.linspace(0.5, 0.95, BATCH * DEPTH, dtype=np.float32).reshape(BATCH, DEPTH)
    prices = costs(a_row=0.0, drafting=0.1)  # so that everything is verified
    load = Load(*(jnp.asarray(value) for value in (BATCH, BATCH, BATCH, 0)))
    survival = jnp.cumprod(jnp.asarray(known), axis=1)
    found = best_budget(survival, jnp.ones_like(survival, bool), load, prices, DEPTHS)
    choice = choice_of(known, rows=0)
    shapes = every_shape((8, 32, 64), BATCH, DEPTHS)
    chosen = choice.choose(shapes, BATCH, prices, range(BATCH))
    assert (chosen.depth, chosen.rows) == (int(found.depth), BATCH + int(found.budget))


def test_a_program_keeps_its_shape_until_another_is_worth_it():
    shapes = every_shape((8, 64), BATCH, (DEPTH,))
    slots = range(BATCH)
    choice = choice_of(np.full((BATCH, DEPTH), 0.5), hysteresis=0.02)

    def chosen(price):
        return choice.choose(shapes, BATCH, costs(a_row=0.0, drafting=price), slots)

    even = sum(0.5**j for j in range(1, DEPTH + 1))  # drafting pays up to this price
    assert chosen(0.9 * even) == shapes[-1]
    assert chosen(1.01 * even) == shapes[-1]
    assert chosen(1.1 * even) == shapes[0]
    assert chosen(0.99 * even) == shapes[0]
    assert chosen(0.9 * even) == shapes[-1]


def test_the_first_requests_are_trusted_and_those_that_end_soon_are_not_drafted_for():
    shapes = every_shape((8, 16, 64), BATCH, DEPTHS)
    choice = choice_of(np.full((8, DEPTH), 0.01))
    assert choice.choose(shapes, BATCH, costs(), range(8)) == shapes[0]
    choice = ShapeChoice(8, choice._step)
    for slot in range(8):
        choice.begin(slot, room=100, rows=1)
    assert choice.choose(shapes, BATCH, costs(), range(8)) == shapes[-1]
    for slot in range(8):
        choice.begin(slot, room=1, rows=1)
    assert choice.choose(shapes, BATCH, costs(), range(8)) == shapes[0]
    assert choice.choose(shapes, BATCH, costs(), []) == shapes[0], "prompts alone draft nothing"


def test_confidences_are_a_running_mean_and_what_is_not_walked_is_trusted_again_slowly():
    low, high = np.full((2, 3), 0.2), np.full((2, 3), 0.8)
    choice = choice_of(low, smoothing=0.5)
    np.testing.assert_allclose(choice._known, 0.6)
    choice.learn([1], [0], report(high, high), [9], [9])
    np.testing.assert_allclose(choice._known.T, [[0.6] * 3, [0.75] * 3])
    choice.learn([0], [1], report(*[low] * 8, depth=1), [9], [9])
    found = choice._known[:, 0]
    assert found[0] == pytest.approx(0.2, abs=0.01)
    assert 0.6 < found[1] == found[2] < 0.615
    for _ in range(240):  # drafting is tried again later than a deeper walk
        choice.learn([0], [0], report(*[low] * 8, depth=0), [9], [9])
    assert 0.85 < choice._known[:, 0].min() < 0.9


def test_a_mean_is_what_it_would_be_step_by_step_whoever_was_in_which_lane():
    rng = np.random.default_rng(0)
    slots, lanes = rng.permutation(6)[:4], rng.permutation(5)[:4]
    measured = report(*rng.uniform(0.2, 1.0, (5, 5, 3)))
    measured.outcome.count = rng.integers(0, 2, (5, 5))
    choice = choice_of(np.full((6, 3), 0.4), smoothing=0.3)
    wanted = choice._known.copy()
    choice.learn(slots, lanes, measured, [9] * 4, [9] * 4)
    for count, seen in zip(
        measured.outcome.count, measured.outcome.decision.confidence, strict=True
    ):
        for slot, lane in zip(slots, lanes, strict=True):
            if count[lane]:
                wanted[:, slot] += 0.3 * (seen[lane] - wanted[:, slot])
    np.testing.assert_allclose(choice._known, wanted, rtol=1e-5)


def test_each_leg_of_a_dispatch_counts_as_deep_as_it_walked():
    """A step beside prompts that drafted nothing, and two behind it that walked to 2 of 3."""
    choice = choice_of(np.full((2, 3), 0.4))
    measured = report(*[np.full((2, 3), 0.8)] * 3)
    measured.outcome.decision.depth = np.array([0, 2, 2])
    choice.learn([0, 1], [0, 1], measured, [9, 9], [9, 9])
    np.testing.assert_allclose(choice._known[:2], 0.8, rtol=1e-6)
    assert 0.4 < choice._known[2].min() <= choice._known[2].max() < 0.41, "it was not measured"


def test_a_new_request_is_taken_for_a_typical_one():
    choice = choice_of(np.full((2, 3), 0.5))
    measured = np.asarray([[0.9, 0.5, 0.3], [0.7, 0.5, 0.1]])
    choice.learn([0, 1], [0, 1], report(*[measured] * 200), [9, 9], [9, 9])
    choice.begin(1, room=9, rows=9)
    np.testing.assert_allclose(choice._known[:, 1], [0.8, 0.5, 0.2], atol=1e-3)
    np.testing.assert_allclose(choice._known[:, 0], [0.9, 0.5, 0.3], atol=1e-3)
    choice.learn([1], [1], report(*[np.zeros((2, 3))] * 200, depth=1), [9], [9])
    choice.begin(0, room=9, rows=9)
    # what nobody walks any more is trusted again, or it would never be tried
    np.testing.assert_allclose(choice._known[:, 0], [0.0, 0.77, 0.63], atol=0.01)


def test_the_first_dispatch_says_what_is_typical():
    choice = choice_of(np.full((2, 3), 0.5))
    choice.learn([0, 1], [0, 1], report(*[np.full((2, 3), 0.5)] * 8), [9, 9], [9, 9])
    choice.begin(1, room=9, rows=9)
    np.testing.assert_allclose(choice._known[:, 1], 0.55, atol=0.01)


def test_a_longer_lag_holds_back_what_is_too_new_also_from_the_next_of_its_slot():
    choice = choice_of(np.full((2, 3), 0.5), lag=4)
    assert (choice._known == 1).all(), "the next dispatch begins two steps later"
    choice.learn([0, 1], [0, 1], report(np.full((2, 3), 0.4)), [9, 9], [9, 9])
    assert (choice._known == 1).all()
    choice.begin(1, room=9, rows=9)
    choice.learn([0, 1], [0, 1], report(*[np.full((2, 3), 0.3)] * 2), [9, 9], [9, 9])
    np.testing.assert_allclose(choice._known.T, [[0.4] * 3, [1.0] * 3])


def test_an_engine_serves_in_the_shapes_that_its_costs_ask_for():
    """Dear rows leave plain decoding, free ones full windows; tokens are the same."""
    answers = []
    for a_row, drafting, skips in ((0.0, 0.0, False), (1.0, 100.0, True)):
        prices = jax.device_put(costs(4, BLOCK, a_row=a_row, drafting=drafting))
        engine = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, cost_table=prices))
        requests = [Request([n, 3], SamplingParams(max_new_tokens=12)) for n in range(6)]
        answers.append([one.token_ids for one in engine.generate(requests)])
        found = as_json(engine.figures())
        steps = found["steps_total"]
        assert (found["draft_skips_total"] > steps / 2) == skips
        full = found["verify_bucket_steps_total"].get("12", 0)
        assert (full > steps / 3) == (not skips)
    assert answers[0] == answers[1]
    assert len(set(itertools.chain(*answers[0]))) > 5
