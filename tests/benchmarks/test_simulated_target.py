"""A simulated target: real steps whose acceptance and confidences are the recorded ones."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import simulated_target
from benchmarks.replayed_pair import DIGITS, unembed
from benchmarks.simulated_target import LABEL, STEPS, Sweep, simulated_pair, starts
from benchmarks.traces import MODE, Traces, read_traces, record
from dspark_jax.calibration.records import AnswerRecord, Records, Source, write_records
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.models.config import DenseConfig
from tests.engine.small import BLOCK, DRAFTER, TARGET
from train.config import DrafterSection

USERS = 3
SIZE = 3
BLOCKS = 200
SHAPE = (
    DenseConfig("qwen3", 256, 16, 16, 1, 2, 1, 8, 1e4, 1e-6, True, 512, qk_norm=True),
    DrafterSection(1, 7, (-1,), 3, 4),
)
SOURCE = Source("t", "d", "0", SIZE, SIZE, MODE, 0.0, 0, 1.0, None, None)


@pytest.fixture(scope="module")
def traces():
    """Confidences that know what is accepted, and are often low."""
    random = np.random.default_rng(0)
    accepted = random.integers(0, SIZE + 1, BLOCKS)
    right = np.arange(SIZE) < accepted[:, None]
    return Traces(SOURCE, 1, np.where(right, 3.0, -6.0).astype(np.float32), accepted)


@pytest.fixture(scope="module")
def sweep(traces):
    pair = simulated_pair("small", SHAPE, traces)
    return Sweep(*pair, (USERS,), rows=8, temperature=0.0, calibration=None)


@pytest.fixture(scope="module")
def costs(sweep, tmp_path_factory):
    """A table by which rows cost by the half dozen, so that few shapes pay."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    rows = list(range(1, USERS * (SIZE + 1) + 1))
    tier = {
        "requests": USERS,
        "contexts": [1],
        "largest_bucket": rows[-1],
        "verify": {"tokens": rows, "seconds": [[0.2 + -(-row // 6)] for row in rows]},
        "draft": [0.1],
    }
    path.write_text(
        json.dumps(
            {
                "device": jax.devices()[0].device_kind,
                "model": sweep.target.name,
                "dtype": "bfloat16",
                "block_size": SIZE,
                "tiers": [tier],
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def ran(sweep, costs):
    """Outcomes of an arm, its dispatches one after the other."""

    @functools.cache
    def run(arm):
        prepared = sweep.prepared(arm, USERS, costs)
        seconds, reports = sweep.run(prepared, USERS, blocks=1)
        outcome = jax.tree.map(lambda *a: np.concatenate(a), *[one.outcome for one in reports])
        return prepared, seconds, reports, outcome

    return run


def text_of(outcome, user):
    """Tokens of one request."""
    rows = zip(outcome.tokens[:, user], outcome.count[:, user], strict=True)
    return np.concatenate([tokens[:count] for tokens, count in rows])


@pytest.mark.parametrize("arm", ["off", "static", "compact"])
def test_every_arm_says_the_same_text(ran, arm):
    outcome = ran(arm)[-1]
    for user in range(USERS):
        text = text_of(outcome, user)
        assert ((text[1:] - text[:-1]) % BLOCKS == 1).all()


def anchors(outcome):
    """The block that each step begins with: the token before its first."""
    return (outcome.tokens[:, :, 0] - 1) % BLOCKS


def test_full_blocks_are_accepted_as_recorded_at_their_position(ran, traces):
    outcome = ran("static")[-1]
    assert (outcome.accepted == traces.accepted[anchors(outcome)]).all()
    assert len(np.unique(outcome.accepted)) == SIZE + 1


def test_windows_cut_what_was_recorded_and_follow_its_confidences(ran, traces):
    prepared, _, _, outcome = ran("compact")
    recorded = traces.accepted[anchors(outcome)]
    assert (outcome.accepted == np.minimum(recorded, outcome.window)).all()
    walked = np.arange(SIZE) < outcome.decision.depth[:, None, None]
    logits = jnp.asarray(traces.logits)[anchors(outcome)]
    np.testing.assert_allclose(
        outcome.decision.confidence, np.where(walked, jax.nn.sigmoid(logits), 0.5), atol=1e-6
    )
    assert outcome.window.std() > 0, "confidences differ, so windows do"
    assert [shape.rows for shape in prepared.steps] == [USERS, 6, USERS * (SIZE + 1)]


def test_a_summary_adds_up(ran):
    _, seconds, reports, outcome = ran("compact")
    found = simulated_target.summarise(seconds, reports, USERS)
    steps = len(outcome.count)
    assert found["steps"] == steps == STEPS * len(reports)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / seconds)
    assert found["accepted_length"] == pytest.approx(found["tokens"] / steps / USERS)
    assert found["mean_window"] == pytest.approx(1 + found["budget_per_request"])
    assert 0 <= found["skipped_draft_share"] < 1
    plain = simulated_target.summarise(1.0, ran("off")[2], USERS)
    assert plain["accepted_length"] == plain["mean_window"] == 1
    assert plain["accepted_share"] is plain["skipped_draft_share"] is None


def test_a_request_that_stops_is_no_result(ran):
    _, seconds, (first, *rest), _ = ran("off")
    counts = first.outcome.count * (np.arange(USERS) > 0)
    short = first.replace(outcome=dataclasses.replace(first.outcome, count=counts))
    with pytest.raises(RuntimeError, match="stopped decoding"):
        simulated_target.summarise(seconds, [short, *rest], USERS)


def test_the_pair_inside_is_still_computed(sweep):
    """The other logits are those of the weights, to the bit."""
    config, weights = sweep.target.config, sweep.target.weights
    hidden = jax.random.normal(jax.random.key(0), (2, 16 + DIGITS), jnp.bfloat16)
    hidden = hidden.at[:, -DIGITS:].set(jnp.array([[5, 0, 0], [199, 0, 0]], jnp.bfloat16))
    found = unembed(config, weights, hidden)
    plain = config.inner.family.unembed(config.inner, weights, hidden[:, :-DIGITS])
    assert jnp.argmax(found, axis=-1).tolist() == [6, 0]
    other = jnp.ones_like(found, bool).at[jnp.arange(2), jnp.array([6, 0])].set(False)
    assert (jnp.where(other, found, 0) == jnp.where(other, plain, 0)).all()


def test_requests_begin_evenly_spaced():
    assert starts(4, 200).tolist() == [0, 50, 100, 150]
    assert starts(1, 200).tolist() == [0]


def test_a_vocabulary_names_every_block(traces):
    more = dataclasses.replace(traces, accepted=np.zeros(257, int))
    with pytest.raises(ValueError, match="257 blocks and small has a vocabulary of 256"):
        simulated_pair("small", SHAPE, more)


PROMPTS, ANSWER = [[1, 2, 3], [4], [9, 8, 7, 6, 5]], 24
ENDLESS = dataclasses.replace(TARGET, stop_token_ids=())


@pytest.fixture(scope="module")
def recorded():
    """Traces at a temperature."""
    options = {"new_tokens": ANSWER, "batch": 2}
    return functools.cache(
        lambda temperature: record(ENDLESS, DRAFTER, PROMPTS, temperature=temperature, **options)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_holds_a_full_block_at_every_position(recorded, tmp_path, temperature):
    found = recorded(temperature)
    assert [len(one.accepted) for one in found.answers] == [ANSWER - BLOCK] * 3
    write_records(tmp_path / "traces.jsonl", found)
    traces = read_traces(tmp_path / "traces.jsonl")
    assert traces.source.temperature == temperature
    assert traces.answers == 3
    assert len(traces.accepted) == 3 * (ANSWER - BLOCK)
    assert len(np.unique(traces.accepted)) > 1
    assert traces.acceptance[0] == (traces.accepted >= 1).mean()


def test_a_greedy_trace_is_what_full_blocks_meet(recorded):
    """From every position at which a full block began, static decoding accepts the same."""
    session = Generator(ENDLESS, DRAFTER, mode="static", max_context=40)
    params = SamplingParams(max_new_tokens=ANSWER)
    answers = session.generate([Request(prompt, params) for prompt in PROMPTS])
    for traced, answer in zip(recorded(0.0).answers, answers, strict=True):
        position = 0
        for accepted, committed in zip(answer.accepted, answer.commits, strict=True):
            if position < len(traced.accepted):
                assert traced.accepted[position] == accepted
            position += committed
        assert position == ANSWER


def test_other_records_are_refused(tmp_path):
    def file(source, verified):
        answer = AnswerRecord("p", ((0.0,) * SIZE,) * 2, (0, 0), verified)
        write_records(tmp_path / "records.jsonl", Records(source, (answer,)))
        return tmp_path / "records.jsonl"

    with pytest.raises(ValueError, match="recorded in mode 'static'; wanted 'every-position'"):
        read_traces(file(dataclasses.replace(SOURCE, mode="static"), (SIZE, SIZE)))
    with pytest.raises(ValueError, match="2 blocks, 1 of them judged in full"):
        read_traces(file(SOURCE, (SIZE, 1)))


@pytest.fixture
def file(traces, tmp_path):
    logits = tuple(map(tuple, traces.logits.tolist()))
    answer = AnswerRecord("p", logits, tuple(traces.accepted.tolist()), (SIZE,) * BLOCKS)
    write_records(tmp_path / "traces.jsonl", Records(SOURCE, (answer,)))
    return tmp_path / "traces.jsonl"


def test_everything_written_says_that_it_is_a_simulation(file, monkeypatch, capsys):
    monkeypatch.setitem(simulated_target.PAIRS, "small", SHAPE)
    out, figure = file.with_name("out.json"), file.with_name("figure.png")
    options = {
        "shape": "small",
        "users": (1, USERS),
        "arms": ("off",),
        "cache_rows": 8,
        "blocks": 1,
    }
    assert simulated_target.main(file, out=out, figure=figure, **options) == 0
    raw = json.loads(out.read_text())
    assert raw["simulation"] == LABEL
    arms = [arm for arm in raw["arms"] if arm["arm"] == "off"]
    assert [arm["concurrency"] for arm in arms] == [1, USERS]
    assert all(arm["accepted_length"] == arm["ratio_to_off"] == 1 for arm in arms)
    assert "SIMULATION" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shape": "huge"}, "shape is 'huge'; wanted one of qwen3-4b, tiny"),
        ({"users": (4, 1)}, "wanted increasing"),
        ({"users": (0, 1)}, "wanted increasing"),
        ({"arms": ("k=9",)}, "arm is 'k=9'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(file, monkeypatch, options, says):
    monkeypatch.setitem(simulated_target.PAIRS, "small", SHAPE)
    monkeypatch.setattr(simulated_target, "Sweep", lambda *_, **__: pytest.fail("a sweep was made"))
    with pytest.raises(ValueError, match=says):
        simulated_target.main(file, out=file, **{"shape": "small", **options})
