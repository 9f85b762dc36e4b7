"""What an engine says of itself: sums over its answers, predictions over its cost table."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.engine.figures import Figure, Histogram, as_json
from dspark_jax.engine.flight import Leg
from dspark_jax.engine.metrics import Metrics
from dspark_jax.engine.prometheus import FigureCollector, exposition
from dspark_jax.schedule.cost import no_costs
from tests.engine.small import BLOCK, SMALL, STOP, VOCAB

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def costs():
    """Rows are dear, so windows are cut; drafts are cheap."""
    plain = no_costs(SMALL.max_requests, BLOCK)
    verify = 10.0 + 5.0 * jnp.arange(plain.verify.shape[1], dtype=jnp.float32)
    draft = 0.5 + plain.draft
    return plain.replace(verify=verify[None], draft=draft, known=jnp.asarray(True))


def requests(count, longest=30):
    random = np.random.default_rng(0)
    return [
        Request(
            random.integers(0, VOCAB, random.integers(2, longest)).tolist(),
            SamplingParams(max_new_tokens=int(random.integers(1, 25))),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def engine(make_engine):
    """In cap-accept everything is verified, so windows and what they cut are both known."""
    engine = make_engine(mode="cap-accept", cost_table=costs(), bound_blocks=True, token_tiers=(5,))
    engine.warmup()
    return engine


@pytest.fixture(scope="module")
def served(engine):
    """Answers, and the figures over exactly them."""
    engine.reset_metrics()
    return engine.generate(requests(16)), as_json(engine.figures())


def test_tokens_and_drafts_add_up_to_those_of_the_answers(served):
    answers, found = served
    assert found["generation_tokens_total"] == sum(len(one.token_ids) for one in answers)
    assert found["spec_verify_calls_total"] == sum(len(one.commits) for one in answers)
    assert found["spec_decode_num_accepted_tokens_total"] == sum(
        sum(one.committed) for one in answers
    )
    assert found["spec_cap_trim_tokens_total"] == sum(sum(one.cap_trim) for one in answers) > 0
    windows = np.concatenate([one.windows for one in answers])
    counts = np.bincount(windows, minlength=BLOCK + 1).tolist()
    assert found["verify_window_tokens"]["counts"] == [*counts, 0]
    assert found["spec_cap_length"] == pytest.approx(windows.mean() + 1)
    reasons = [one.finish_reason for one in answers]
    assert found["request_success_total"] == {one: reasons.count(one) for one in set(reasons)}


def test_lengths_are_means_over_steps(served):
    answers, found = served
    steps = sum(len(one.commits) for one in answers)
    tokens = sum(len(one.token_ids) for one in answers)
    trimmed = sum(sum(one.cap_trim) for one in answers)
    assert found["spec_accept_length"] == pytest.approx(tokens / steps)
    assert found["spec_block_accept_length"] == pytest.approx((tokens + trimmed) / steps)


def test_bounds_on_full_blocks_stand_between_what_was_committed_and_what_was_verified(served):
    _, found = served
    low, high = (found[f"spec_block_accept_length_{name}"] for name in ("low", "high"))
    assert found["spec_accept_length"] < low <= found["spec_block_accept_length"]
    assert low <= high <= BLOCK + 1


def test_acceptance_by_position_is_that_of_the_answers(served):
    answers, found = served
    for position in range(1, BLOCK + 1):
        reached = [
            (got >= position)
            for one in answers
            for window, got, count in zip(one.windows, one.committed, one.commits, strict=True)
            # behind an accepted stop nothing was tried
            if min(window, count if count <= got else window) >= position <= got + 1
        ]
        where = str(position)
        accepted = found["spec_decode_num_accepted_tokens_per_pos_total"]
        tried = found["spec_decode_num_reached_tokens_per_pos_total"]
        verified = found["spec_decode_num_verified_tokens_per_pos_total"]
        assert tried[where] == len(reached)
        assert accepted[where] == sum(reached)
        assert verified[where] >= tried[where]


def test_expected_drafts_are_the_survivals_of_windows(served):
    answers, found = served
    expected = sum(one.service.expected_accepted for one in answers)
    assert found["spec_decode_num_expected_tokens_total"] == pytest.approx(expected)
    assert 0 < expected <= found["spec_decode_num_draft_tokens_total"]
    assert 0 <= found["confidence_ece"]["1"] <= 1
    assert found["confidence_ece"].keys() == {"1", "2"}


def test_prompts_and_pages_are_counted(engine, served):
    answers, found = served
    assert found["prompt_tokens_total"] == sum(len(one.prompt_ids) for one in answers)
    assert found["num_pages"]["used"] == 0
    assert sum(found["num_pages"].values()) == SMALL.pages
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["prefix_cache_queries_total"] > found["prefix_cache_hits_total"]
    waiting = requests(6)
    names = [engine.add(request) for request in waiting]
    engine.step()
    now = as_json(engine.figures())
    assert now["num_requests_running"] == SMALL.max_requests
    assert now["num_requests_waiting"] == 2
    assert now["num_pages"]["used"] > 0
    for name in names:
        engine.abort(name)
    while engine.busy:
        engine.step()
    assert as_json(engine.figures())["request_success_total"]["abort"] == 6


def test_a_known_prefix_is_a_hit(engine):
    prompt = list(range(20))
    engine.generate([Request(prompt, SamplingParams(max_new_tokens=1))])
    engine.reset_metrics()
    (answer,) = engine.generate([Request(prompt, SamplingParams(max_new_tokens=1))])
    found = as_json(engine.figures())
    assert found["prefix_cache_queries_total"] == 19
    assert found["prefix_cache_hits_total"] == answer.service.reused_rows == 16


def test_what_is_in_flight_at_a_reset_is_timed_from_the_end_of_what_it_waited_for(engine, solo):
    prompt = next([token] for token in range(VOCAB) if len(solo([token], 30)) == 30)
    index = engine.add(Request(prompt, SamplingParams(max_new_tokens=30)))
    while not engine.tokens(index):
        engine.step()
    (flight,) = engine._flights
    begun = engine._metrics._read_at
    assert flight.sent < begun
    engine.reset_metrics()
    engine.step()
    assert as_json(engine.figures())["step_seconds"]["sum"] == pytest.approx(
        flight.legs[-1].ended - begun
    )
    engine.abort(index)


def test_times_are_read_off_the_clock_and_predictions_off_the_table(engine):
    while engine.busy:
        engine.step()
    engine.reset_metrics()
    ticks = iter(range(10_000))
    engine._metrics.clock = lambda: float(next(ticks))
    (answer,) = engine.generate([Request([1], SamplingParams(max_new_tokens=4))])
    service, found = answer.service, as_json(engine.figures())
    assert 0 < service.queue_seconds < service.first_token_seconds <= service.seconds
    steps = found["steps_total"]
    assert found["step_seconds"]["count"] == steps
    # every step ran for 4 windows of 3 rows
    drafted = steps - found["draft_skips_total"]
    assert found["step_time_predicted_seconds_total"] == pytest.approx(70 * steps + 0.5 * drafted)
    measured = found["step_time_measured_seconds_total"]
    assert measured == pytest.approx(found["step_seconds"]["sum"])
    assert found["time_to_first_token_seconds"]["sum"] == service.first_token_seconds


def test_a_step_that_reads_a_prompt_alone_skips_nothing(engine):
    engine.reset_metrics()
    engine.generate([Request([1] * 30, SamplingParams(max_new_tokens=1))])
    found = as_json(engine.figures())
    assert found["steps_total"] > found["spec_verify_calls_total"] == 1
    assert found["draft_skips_total"] <= 1
    assert sum(found["verify_bucket_steps_total"].values()) == 1


def test_a_compact_step_is_priced_by_its_bucket_and_context():
    """Two steps of two requests, of which one ends at an accepted stop with a draft behind it."""
    plain = no_costs(4, BLOCK)
    verify = jnp.stack([jnp.arange(13.0), 10 + jnp.arange(13.0)])
    draft = jnp.ones((2, 5))
    tables = plain.replace(
        verify=verify, draft=draft, contexts=jnp.asarray([0.0, 100.0]), known=jnp.asarray(True)
    )
    step = SimpleNamespace(depth=2, width=3, mode="compact", drafts=True, buckets=(4, 6, 12))
    scheduler = SimpleNamespace(
        preemptions=0,
        sought_rows=0,
        reused_rows=0,
        waiting=[],
        running=[],
        store=SimpleNamespace(count=1, free=1, cached=0),
    )
    before: Any = SimpleNamespace(_read_at=1.0, _waited=True)
    costs = {(4, 0): tables}
    metrics = Metrics(step, lambda step, _: step, lambda: costs, scheduler, before=before)
    outcome = SimpleNamespace(
        count=np.array([[2, 1, 0, 0], [3, 0, 0, 0]]),
        window=np.array([[1, 2, 0, 0], [2, 0, 0, 0]]),
        accepted=np.array([[1, 2, 0, 0], [2, 0, 0, 0]]),
        bounds=None,
        decision=SimpleNamespace(
            budget=np.array([3, 2]),
            depth=np.array([2, 0]),
            confidence=np.array([[[0.5, 0.5], [0.5, np.nan]] + [[1, 1]] * 2] * 2, np.float32),
        ),
    )
    leg = Leg(steps=2, pieces=0, shape=None, ended=7.0, waited=True, ahead=True)
    flight = SimpleNamespace(sent=1.0, batch=4, legs=[leg])
    rows = np.array([20, 30, 0, 0])
    expected = metrics.read(flight, SimpleNamespace(outcome=outcome), rows)
    found = as_json(metrics.figures())
    # 5 rows in a bucket of 6 at 50 cache rows, with drafts; then 3 rows in 4 at 22, without
    assert found["verify_bucket_steps_total"] == {"6": 1, "4": 1}
    assert found["verify_bucket_fill"] == pytest.approx(8 / 10)
    assert found["step_time_predicted_seconds_total"] == pytest.approx(5 + 5 + 1 + 3 + 2.2)
    assert found["step_time_measured_seconds_total"] == pytest.approx(6.0)
    assert found["spec_decode_num_draft_tokens_total"] == 1 + 1 + 2
    assert found["spec_decode_num_accepted_tokens_total"] == 4
    assert found["spec_decode_num_expected_tokens_total"] == pytest.approx(0.5 + 0.5 + 0.75)
    assert expected.tolist() == pytest.approx([1.25, 0.5, 0, 0])
    assert found["draft_skips_total"] == 1
    # three seconds a step
    assert found["step_time_relative_error"] == pytest.approx((11 - 3 + 5.2 - 3) / 3 / 2)
    # launched late, it began at any time after the one before; read late, it ended before
    for waited, ahead in ((True, False), (False, True), (True, True)):
        leg = Leg(steps=2, pieces=0, shape=None, ended=7.001, waited=waited, ahead=ahead)
        flight = SimpleNamespace(sent=1.0, batch=4, legs=[leg])
        metrics.read(flight, SimpleNamespace(outcome=outcome), rows)
        late = as_json(metrics.figures())
        assert late["step_time_relative_error"] == found["step_time_relative_error"]
    # the last began when the one read late had ended, which nobody saw
    assert late["step_time_measured_seconds_total"] == pytest.approx(6.001)


def test_measuring_reads_nothing_that_was_not_copied_back(engine):
    with jax.no_tracing(), jax.transfer_guard("disallow"):
        engine.generate(requests(6))
        assert engine.figures()


def test_prometheus_reads_back_what_json_says(engine):
    figures = engine.figures()
    plain = as_json(figures)
    json.dumps(plain, allow_nan=False)
    families = {one.name: one for one in text_string_to_metric_families(exposition(figures))}
    assert len(families) == len(figures) == len(plain)
    for figure in figures:
        family = families["dspark:" + figure.name.removesuffix("_total")]
        assert family.type == figure.kind
        assert family.documentation == f"{figure.meaning} [{figure.unit}]"
        if figure.kind == "histogram":
            values = {one.labels.get("le", one.name): one.value for one in family.samples}
            assert values["+Inf"] == plain[figure.name]["count"]
            assert values[family.name + "_sum"] == pytest.approx(plain[figure.name]["sum"])
        elif figure.label:
            found = {one.labels[figure.label]: one.value for one in family.samples}
            there = {key: one for key, one in plain[figure.name].items() if one is not None}
            assert found == pytest.approx(there)
        else:
            found = [one.value for one in family.samples]
            wanted = plain[figure.name]
            assert found == ([] if wanted is None else [pytest.approx(wanted)])


def test_a_registry_sees_current_figures(engine):
    collector = FigureCollector(engine.figures)

    def steps():
        (family,) = [one for one in collector.collect() if one.name == "dspark:steps"]
        return family.samples[0].value

    before = steps()
    engine.generate([Request([1, 2], SamplingParams(max_new_tokens=2))])
    assert steps() > before


def test_histogram_counts_up_to_each_bound():
    histogram = Histogram((1, 2))
    histogram.add([0, 1, 1.5, 2, 7])
    assert histogram.counts.tolist() == [2, 2, 1]
    assert histogram.mean == 2.3
    text = exposition([Figure("x", "histogram", "s", "X.", histogram)])
    assert 'dspark:x_bucket{le="2.0"} 4.0' in text
    assert 'dspark:x_bucket{le="+Inf"} 5.0' in text


def test_every_metric_is_documented_with_its_unit(engine):
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE))
    assert {name: unit.strip() for name, unit in rows.items()} == {
        figure.name: figure.unit for figure in engine.figures()
    }


def test_drafts_behind_an_accepted_stop_count_for_nothing():
    answer = Completion(
        prompt_ids=(1,),
        token_ids=(2, 3, STOP),
        text=None,
        finish_reason="stop",
        windows=(1, 2),
        accepted=(3, 2),
        commits=(2, 1),
        logprobs=None,
    )
    assert answer.committed == (1, 1)
    assert answer.cap_trim == (2, 0)
    assert answer.acceptance_by_position == (1.0, None)


def test_how_it_was_served_is_no_part_of_an_answer():
    plain = Completion((1,), (2,), None, "length", (1,), (0,), (1,), None)
    assert dataclasses.replace(plain, service="slow") == plain
