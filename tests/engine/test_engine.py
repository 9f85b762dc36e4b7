"""Whatever is served, preempted or aborted beside it, a request gets the answer it has alone."""

import dataclasses
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.engine.config import EngineConfig, check_prompt_width, piece_tiers, usual_pieces
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.figures import as_json
from dspark_jax.engine.flight import Flight
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing.markov import MarkovTargetConfig
from tests.engine.small import BLOCK, DRAFTER, SMALL, STOP, TARGET, VOCAB

# Few programs, because compiling is what takes time here: most tests share those of "compact".
MODES = {
    "off": {"mode": "off", "batch_tiers": (2, 4), "max_batched_tokens": 9},
    "cap-accept": {"mode": "cap-accept", "threshold": 0.6},
    "fixed k": {"mode": "static", "k": 1},
}


def priced():
    """Costs under which windows depend on the batch."""
    plain = no_costs(SMALL.max_requests, BLOCK)
    verify = 1.0 + 0.12 * jnp.arange(plain.verify.shape[1], dtype=jnp.float32)
    return plain.replace(verify=verify[None], known=jnp.asarray(True))


def random_requests(count, seed=0, longest=50, **params):
    random = np.random.default_rng(seed)
    return [
        Request(
            random.integers(0, VOCAB, random.integers(1, longest)).tolist(),
            SamplingParams(max_new_tokens=int(random.integers(1, 40)), seed=index, **params),
        )
        for index in range(count)
    ]


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def drain(engine):
    """Step until nothing is left, but not for ever."""
    found = {}
    for _ in range(10_000):
        if not engine.busy:
            return found
        found |= engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.fixture(scope="module")
def compact(make_engine):
    """Engines with one set of programs, warmed up for sampling: greedy requests use them too."""

    def make(**changes):
        engine = make_engine(cost_table=priced(), **changes)
        engine.warmup(SamplingParams(temperature=1.0))
        return engine

    return make


@pytest.fixture(scope="module")
def engine(compact):
    return compact()


def test_a_life_of_joins_aborts_preemptions_and_full_pools_ends_where_it_began(engine, solo):
    drain(engine)
    pages = engine.free_pages
    random = np.random.default_rng(1)
    sizes = []
    for round_of_life in range(2):
        asked, found, aborted = {}, {}, {}
        for request in random_requests(80, seed=round_of_life):
            asked[engine.add(request)] = request
            for _ in range(random.integers(0, 4)):
                found |= engine.step()
            live = [index for index in asked if index not in found and index not in aborted]
            if live and random.uniform() < 0.15:
                index = int(random.choice(live))
                aborted[index] = engine.abort(index)
        found |= drain(engine)
        for index, request in asked.items():
            answer = (aborted | found)[index]
            alone = solo(request.prompt, request.params.max_new_tokens)
            assert answer.token_ids == alone[: len(answer.token_ids)]
            assert index in aborted or answer.token_ids == alone
            assert sum(answer.commits) == len(answer.token_ids)
        assert len(aborted) > 3
        assert engine.free_pages == pages == SMALL.pages
        sizes.append(live_bytes())
    assert engine.preemptions > 10, "the pool was never full"
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("mode", ["off", "cap-accept"])
def test_greedy_answers_are_those_of_the_target_alone(make_engine, solo, mode):
    engine = make_engine(**MODES[mode])
    requests = random_requests(20, seed=2)
    answers = engine.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == solo(request.prompt, request.params.max_new_tokens)
        full = len(request.prompt) + len(answer.token_ids) == SMALL.max_context
        stopped = answer.token_ids[-1] == STOP
        assert answer.finish_reason == ("stop" if stopped else "context" if full else "length")
    windows = {window for answer in answers for window in answer.windows}
    assert windows == ({0} if mode == "off" else set(range(BLOCK + 1)))
    mean = np.mean([answer.accepted_length for answer in answers])
    assert mean == 1 if mode == "off" else mean > 1.3


def test_sampled_answers_are_those_of_a_session_however_often_preempted(make_engine):
    requests = random_requests(16, seed=3, longest=20, temperature=0.8)
    requests += random_requests(2, seed=4, longest=20, logprobs=2)
    engine = make_engine(pages=16, **MODES["fixed k"])
    engine.warmup(SamplingParams(temperature=1.0, logprobs=2))
    found = engine.generate(requests)
    assert engine.preemptions > 0
    session = Generator(TARGET, DRAFTER, batch=4, max_context=SMALL.max_context, mode="static", k=1)
    for one, other in zip(found, session.generate(requests), strict=True):
        assert dataclasses.replace(one, logprobs=None) == dataclasses.replace(other, logprobs=None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [pair[0] for pair in mine.top] == [pair[0] for pair in theirs.top]
    assert [len(one.logprobs or ()) for one in found[16:]] == [
        len(one.token_ids) for one in found[16:]
    ]
    assert found[0].logprobs is None


def test_tokens_do_not_depend_on_overlap(compact):
    def serve(overlap):
        engine = compact(overlap=overlap)
        random = np.random.default_rng(4)
        found = {}
        for request in random_requests(30, seed=4, temperature=0.9):
            engine.add(request)
            for _ in range(random.integers(0, 5)):
                found |= engine.step()
        return found | drain(engine)

    on, off = serve(True), serve(False)
    assert on == off
    windows = [window for answer in on.values() for window in answer.windows]
    assert len(set(windows)) > 2


def test_the_next_dispatch_is_planned_while_one_is_still_being_launched(compact, monkeypatch):
    engine = compact()
    launch, blocked = engine._programs._launch, threading.Event()

    def slow(call):
        assert blocked.wait(60)
        return launch(call)

    monkeypatch.setattr(engine._programs, "_launch", slow)
    name = engine.add(Request([1, 2], SamplingParams(max_new_tokens=4)))
    assert engine.step() == {}, "it has come back although nothing runs"
    [flight] = engine._flights
    blocked.set()
    assert len(drain(engine)[name].token_ids) > 0
    assert not flight.legs[0].ahead, "the device had nothing to do meanwhile"


def test_a_launch_is_ahead_while_the_device_is_busy_with_the_one_before(compact, monkeypatch):
    engine, wait = compact(), Flight.wait
    asked, legs = [], []

    def over(report):
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    def waited(flight, clock):
        wait(flight, clock)
        legs.extend(flight.legs)

    monkeypatch.setattr("dspark_jax.engine.programs._over", over)
    monkeypatch.setattr(Flight, "wait", waited)
    while len(legs) < 4:
        engine.add(Request([1, 2], SamplingParams(max_new_tokens=4)))
        drain(engine)
    assert [leg.ahead for leg in legs] == [False, *(not one for one in asked)], "none before it"


def test_500_mixed_requests_trace_nothing_and_move_nothing_unasked_after_warm_up(
    compact, monkeypatch
):
    plain = Flight.wait

    def wait(flight, clock):
        plain(flight, clock)
        for leg in flight.legs:  # however slow the host was: tables are to be corrected
            leg.waited = leg.ahead = True

    monkeypatch.setattr(Flight, "wait", wait)
    engine = compact(correct_costs=True)
    random = np.random.default_rng(5)
    asked, found, aborted = {}, {}, set()

    def request(index):
        # a few long ones come together; the others are read and answered in a step or two
        prompt_rows, tokens = (30, 25) if index % 100 < 6 else (8, 3)
        prompt = random.integers(0, VOCAB, random.integers(1, prompt_rows)).tolist()
        params = {"temperature": 0.7, "seed": index} if index % 2 else {}
        length = int(random.integers(1, tokens))
        return Request(prompt, SamplingParams(max_new_tokens=length, **params))

    with jax.no_tracing(), jax.transfer_guard("disallow"):
        for index in range(500):
            asked[engine.add(request(index))] = index
            while len(engine._live) > 6:
                found |= engine.step()
            if index % 25 == 24:
                aborted.add(max(engine._live))
                engine.abort(max(engine._live))
        found |= drain(engine)
    assert found.keys() == asked.keys() - aborted
    assert all(answer.token_ids for answer in found.values())
    assert len(aborted) == 20
    assert engine.preemptions > 0
    assert as_json(engine.figures())["cost_factor"], "tables were corrected"
    assert engine.free_pages == SMALL.pages


def test_a_restored_prefix_restores_the_drafters_context(compact, engine):
    prompt = np.random.default_rng(7).integers(0, VOCAB, 33).tolist()
    request = Request(prompt, SamplingParams(max_new_tokens=20))
    drain(engine)
    first, second = (engine.generate([request])[0] for _ in range(2))
    fresh = compact(prefix_reuse=False).generate([request])[0]
    assert second == first == fresh, "windows and acceptance included"
    assert engine.reused_rows >= 32


def test_a_warm_up_beside_running_requests_takes_nothing_from_them(engine, solo):
    drain(engine)
    prompt = next([token] for token in range(VOCAB) if len(solo([token], 30)) == 30)
    index = engine.add(Request(prompt, SamplingParams(max_new_tokens=30)))
    while not engine.tokens(index):
        engine.step()
    engine.warmup(SamplingParams(temperature=1.0))
    assert drain(engine)[index].token_ids == solo(prompt, 30)


def test_tables_without_measurements_are_no_cost_table(make_engine, caplog):
    engine = make_engine(cost_table=no_costs(SMALL.max_requests, BLOCK))
    assert engine._choice is None, "windows would be decided by costs"
    assert "every drafted token is verified" in caplog.text


def test_an_abort_is_final(engine, solo):
    drain(engine)
    index = engine.add(Request([3, 4], SamplingParams(max_new_tokens=30)))
    assert engine.abort(index).token_ids == ()
    assert not engine.busy
    prompt = next([token] for token in range(VOCAB) if len(solo([token], 30)) == 30)
    index = engine.add(Request(prompt, SamplingParams(max_new_tokens=30)))
    while not (answer := engine.tokens(index)):
        engine.step()
    aborted = engine.abort(index)
    assert aborted.finish_reason == "abort"
    assert aborted.token_ids == answer
    assert index not in drain(engine)
    with pytest.raises(KeyError, match=f"request {index} is not waiting"):
        engine.abort(index)


def test_answers_that_end_beside_a_list_are_not_lost(engine, solo):
    drain(engine)
    index = engine.add(Request([1, 2], SamplingParams(max_new_tokens=2)))
    engine.generate([Request([3, 4, 5], SamplingParams(max_new_tokens=30))])
    assert engine.generate([]) == []
    assert engine.step()[index].token_ids == solo([1, 2], 2)
    assert not engine.busy


def test_a_refused_request_starts_none_of_its_companions(engine):
    drain(engine)
    with pytest.raises(ValueError, match="prompt of 60 tokens"):
        engine.generate([Request([1]), Request([1] * 60)])
    assert not engine.busy


def test_tokens_are_cut_at_a_stop_string_and_text_is_shown_as_it_grows():
    letters = dataclasses.replace(TARGET, text=Letters())
    short = {"context_tiers": (32,), **MODES["off"]}
    engine = Engine(letters, None, dataclasses.replace(SMALL, **short))
    prompt = Letters().encode("hello")
    (plain,) = engine.generate([Request(prompt, SamplingParams(max_new_tokens=30))])
    assert len(plain.text) > 8
    stop = plain.text[5:7]
    pieces = []
    params = SamplingParams(max_new_tokens=30, stop=(stop,))
    index = engine.add(Request("hello", params), on_text=pieces.append)
    answer = drain(engine)[index]
    assert answer.text == "".join(pieces) == plain.text[: plain.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert Letters().decode(answer.token_ids).endswith(stop)
    assert sum(answer.commits) == len(answer.token_ids)


def test_whom_a_callback_aborts_is_up_to_date(solo):
    letters = dataclasses.replace(TARGET, text=Letters())
    engine = Engine(letters, None, dataclasses.replace(SMALL, **MODES["off"], steps=2))
    victim = next([token] for token in range(VOCAB) if len(solo([token], 20)) == 20)
    aborted = []

    def give_up(_):
        if not aborted and len(engine.tokens(index)) > 2:
            aborted.append(engine.abort(index))

    engine.add(Request(victim, SamplingParams(max_new_tokens=20)), on_text=give_up)
    index = engine.add(Request(victim, SamplingParams(max_new_tokens=20, logprobs=1)))
    drain(engine)
    (answer,) = aborted
    assert 2 < len(answer.token_ids) < 20
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)


def test_a_failing_callback_costs_nobody_a_token_and_another_may_abort(solo):
    letters = dataclasses.replace(TARGET, text=Letters())
    engine = Engine(letters, None, dataclasses.replace(SMALL, **MODES["off"]))
    params = SamplingParams(max_new_tokens=20)
    long = [[token] for token in range(VOCAB) if len(solo([token], 20)) == 20]
    asked = [Request(prompt, params) for prompt in long[:2]]
    alone = engine.generate(asked)

    def fail(piece):
        raise OSError("nobody listens")

    def give_up(piece):
        aborted.append(engine.abort(index))

    aborted, found, failures = [], {}, 0
    failing = [engine.add(asked[0], on_text=fail), engine.add(asked[1])]
    index = engine.add(asked[0], on_text=give_up)
    for _ in range(200):
        try:
            found |= engine.step()
        except OSError:
            failures += 1
    assert not engine.busy
    assert failures > 1
    assert [found[one] for one in failing] == alone
    assert [one.finish_reason for one in aborted] == ["abort"]
    assert index not in found
    assert engine.free_pages == SMALL.pages


def test_a_step_inside_a_callback_is_refused_and_the_step_around_it_goes_on(solo):
    letters = dataclasses.replace(TARGET, text=Letters())
    engine = Engine(letters, None, dataclasses.replace(SMALL, **MODES["off"]))
    prompt = next([token] for token in range(VOCAB) if len(solo([token], 20)) == 20)
    request = Request(prompt, SamplingParams(max_new_tokens=20))
    again = {
        "step": engine.step,
        "generate": lambda: engine.generate([request]),
        "warmup": engine.warmup,
    }
    for name, call in again.items():
        said = []

        def from_within(piece, call=call, said=said):
            if not said:
                said.append(piece)
                call()

        index = engine.add(request, on_text=from_within)
        with pytest.raises(RuntimeError, match="a step is running: on_text callbacks may add"):
            drain(engine)
        assert drain(engine)[index].token_ids == solo(prompt, 20), name
        assert said
    assert engine.free_pages == SMALL.pages


def test_ctrl_c_in_a_callback_or_while_waiting_costs_nobody_a_token(solo, monkeypatch):
    letters = dataclasses.replace(TARGET, text=Letters())
    engine = Engine(letters, None, dataclasses.replace(SMALL, **MODES["off"]))
    requests = random_requests(6, seed=8)
    plain, moments = Flight.wait, iter(range(1_000))

    def wait(flight, clock):
        if next(moments) % 3 == 1:
            raise KeyboardInterrupt
        plain(flight, clock)

    def interrupted(piece):
        raise KeyboardInterrupt

    monkeypatch.setattr(Flight, "wait", wait)
    names = [engine.add(request, on_text=interrupted) for request in requests]
    found, interrupts = {}, 0
    for _ in range(500):
        try:
            found |= engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 10
    for name, request in zip(names, requests, strict=True):
        assert found[name].token_ids == solo(request.prompt, request.params.max_new_tokens)


@pytest.mark.parametrize("part", ["dispatch", "read"])
def test_after_an_error_on_the_device_every_call_names_it(make_engine, monkeypatch, part):
    engine = make_engine(**MODES["off"])
    index = engine.add(Request([1], SamplingParams(max_new_tokens=20)))
    engine.step()
    place = {"dispatch": (engine._programs, "dispatch"), "read": (Flight, "read")}[part]

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GB")

    monkeypatch.setattr(*place, fail)
    with pytest.raises(jax.errors.JaxRuntimeError):
        engine.step()
    monkeypatch.undo()
    calls = (
        engine.step,
        engine.warmup,
        lambda: engine.add(Request([1])),
        lambda: engine.generate([]),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"JaxRuntimeError: RESOURCE_EXHAUSTED: 3 GB; .*new"):
            call()
    assert engine.abort(index).finish_reason == "abort"


class Letters:
    """Every token is a letter."""

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"[:VOCAB]

    def encode(self, text):
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.letters[i] for i in ids)

    def stream(self):
        from dspark_jax.text.stream import TextStream

        return TextStream(self.decode)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pages": 14}, "pages is 14; wanted at least 15"),
        (
            {"max_batched_tokens": 16},
            "max_batched_tokens is 16; wanted at least 17: 4 windows of 3",
        ),
        ({"batch_tiers": (2, 3)}, r"batch_tiers are \(2, 3\).*end at max_requests, 4"),
        ({"context_tiers": (30, 20)}, r"context_tiers are \(30, 20\)"),
        ({"context_tiers": (99,)}, "context tier is 99 rows, max_context is 60"),
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"threshold": 0.5, "mode": "static"}, "threshold is 0.5 in mode 'static'"),
        ({"k": 1, "mode": "off"}, 'k is 1 in mode "off"'),
        ({"policy": "causal", "mode": "static"}, "policy is 'causal' in mode 'static'"),
        ({"cost_table": "x.json", "mode": "off"}, "a cost table is given and mode is 'off'"),
        ({"cost_table": "x.json", "threshold": 0.5}, "a cost table is given and threshold is 0.5"),
        ({"calibration": "x.json", "mode": "off"}, 'a calibration is given and mode is "off"'),
        ({"token_tiers": (6,), "mode": "static"}, r"token_tiers are \(6,\) in mode 'static'"),
        ({"steps": 0}, "steps is 0"),
        ({"page_size": 2.5}, "page_size is 2.5"),
        ({"k": 9}, "k is 9"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(make_engine, change, says):
    with pytest.raises(ValueError, match=says):
        make_engine(**change)


def test_pieces_of_prompts_are_even_on_a_gpu():
    check_prompt_width(5, "cpu")
    check_prompt_width(16, "gpu")
    with pytest.raises(ValueError, match="prompt_width is 5; wanted an even number"):
        check_prompt_width(5, "gpu")


def test_few_prompts_ride_in_a_program_for_few():
    assert piece_tiers(1) == (1,)
    assert piece_tiers(16) == (1, 16)
    assert piece_tiers(usual_pieces(256, 16)) == (1, 16, 64)
    assert piece_tiers(usual_pieces(1024, 16)) == (1, 16, 64, 256)


def test_a_gpu_takes_fewer_steps_a_dispatch_where_they_are_long(monkeypatch):
    config = EngineConfig(max_requests=1024, batch_tiers=(16, 1024))
    assert config.dispatch_steps(1024) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [config.dispatch_steps(requests) for requests in (1, 16, 17, 1024)] == [4, 4, 2, 2]
    assert dataclasses.replace(config, steps=3).dispatch_steps(1024) == 3


def test_a_target_without_pages_is_refused():
    unpaged = dataclasses.replace(TARGET, config=MarkovTargetConfig(VOCAB))  # pyright: ignore
    with pytest.raises(NotImplementedError, match="no paged cache"):
        Engine(unpaged)


def test_an_engine_without_costs_says_that_it_verifies_everything(make_engine, caplog):
    with caplog.at_level(logging.WARNING):
        make_engine()
    assert "no cost table: every drafted token is verified" in caplog.text
