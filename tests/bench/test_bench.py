"""Every arm gets the same requests, figures add up, and what cannot run is refused first."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.bench import bench, plots
from dspark_jax.bench.apart import at_once
from dspark_jax.bench.arms import allowed_arms, arm_config, chosen_arms
from dspark_jax.bench.bench import Traffic, run_arms
from dspark_jax.bench.load import Load, closed_loop
from dspark_jax.bench.record import Record
from dspark_jax.bench.summary import add_ratios, mixed_traffic, summarise, verdicts
from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.cli import bench as subcommand
from dspark_jax.cli import main as entry
from dspark_jax.cli.main import main
from dspark_jax.decode.request import Completion, Request, SamplingParams, Service
from dspark_jax.engine.config import EngineConfig
from dspark_jax.schedule.cost import MeasuredCosts, TierCosts, no_costs
from dspark_jax.text.stream import TextStream
from tests.engine.small import BLOCK, DRAFTER, TARGET, VOCAB

USERS = 2
PARAMS = SamplingParams(max_new_tokens=10, seed=0)


def costs():
    plain = no_costs(USERS, BLOCK)
    verify = 1.0 + 0.3 * jnp.arange(plain.verify.shape[1], dtype=jnp.float32)
    return plain.replace(verify=verify[None], known=jnp.asarray(True))


# One draft a block: compiling is what takes time here.
BASE = EngineConfig(
    max_requests=USERS,
    k=1,
    max_context=32,
    page_size=8,
    prompt_width=8,
    max_batched_tokens=USERS * (BLOCK + 1) + 8,
    batch_tiers=(USERS,),
    token_tiers=(),
    prefix_reuse=False,
    cost_table=costs(),
    correct_costs=False,
    bound_blocks=True,
)


def traffic():
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, 1 + index % 5).tolist() for index in range(6)]
    return Traffic(prompts, ["short", "long"] * 3)


def run(path, arms, **changes):
    record = Record(path)
    options = {"rounds": 4, "least": 1, "tell": lambda _: None} | changes
    concurrency = options.pop("concurrency", (1, USERS))
    run_arms(TARGET, DRAFTER, BASE, arms, concurrency, traffic(), PARAMS, record, **options)
    return record


ARMS = ("off", "compact", "cap-accept")


def written_by(path, arms, **changes):
    """What a run writes, as it stands in the file at each time."""
    written = []
    run(path, arms, tell=lambda _: written.append(path.read_text()), **changes)
    return [json.loads(text) for text in written]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Three arms under one load: another load is another engine to compile."""
    return written_by(tmp_path_factory.mktemp("bench") / "raw.json", ARMS, concurrency=(USERS,))


def test_the_result_is_written_after_every_load_of_every_arm(measured, tmp_path):
    assert [len(one["arms"]) for one in measured] == [1, 2, 3]
    assert [arm["arm"] for arm in measured[-1]["arms"]] == list(ARMS)
    loads = written_by(tmp_path / "raw.json", ("off",))
    assert [len(one["arms"]) for one in loads] == [1, 2]
    assert [(arm["concurrency"], arm["requests"]) for arm in loads[-1]["arms"]] == [(1, 4), (2, 8)]


def test_a_load_that_is_repeated_keeps_its_middle_run(tmp_path, monkeypatch):
    seconds = iter([3.0, 9.0, 5.0])
    turns = []

    def loop(engine, requests, users):
        load = closed_loop(engine, requests, users)
        measured = requests[0].params.max_new_tokens > bench.WARM_TOKENS
        return dataclasses.replace(load, seconds=next(seconds)) if measured else load

    @contextlib.contextmanager
    def turn(users):
        turns.append(users)
        yield

    monkeypatch.setattr(bench, "closed_loop", loop)
    changes = {"concurrency": (USERS,), "repeats": 3, "turn": turn}
    (last,) = written_by(tmp_path / "raw.json", ("off",), **changes)
    (arm,) = last["arms"]
    assert turns == [USERS] * 3, "a turn a run"
    assert arm["seconds"] == 5.0
    assert arm["every_tokens_per_second"] == [arm["tokens"] / one for one in (3.0, 9.0, 5.0)]
    assert arm["metrics"]["generation_tokens_total"] == arm["tokens"], "of this run alone"


def test_a_run_that_fails_ends_the_repeats(tmp_path, monkeypatch):
    calls = []

    def loop(engine, requests, users):
        calls.append(users)
        if len(calls) == 4:  # each run is two, of which one is not measured
            raise RuntimeError("the second run fails")
        return closed_loop(engine, requests, users)

    monkeypatch.setattr(bench, "closed_loop", loop)
    record = run(tmp_path / "raw.json", ("off",), concurrency=(USERS,), repeats=3)
    assert [arm["error"] for arm in record.arms] == ["RuntimeError: the second run fails"]
    assert len(calls) == 4


def test_every_arm_answers_the_same_prompts_and_nothing_of_the_warm_up_counts(measured):
    arms = measured[-1]["arms"]
    columns = measured[-1]["answer_columns"]
    tokens, steps = columns.index("tokens"), columns.index("steps")
    assert len({str([row[:3] for row in arm["answers"]]) for arm in arms}) == 1, "greedy"
    for arm in arms:
        assert arm["requests"] == len(arm["answers"]) == 4 * USERS
        assert arm["tokens"] == sum(row[tokens] for row in arm["answers"])
        assert arm["metrics"]["generation_tokens_total"] == arm["tokens"]
        assert arm["tokens_per_second"] == pytest.approx(arm["tokens"] / arm["seconds"])
        taken = sum(row[steps] for row in arm["answers"])
        assert arm["accepted_length"] == pytest.approx(arm["tokens"] / taken)
    off, compact, _ = arms
    assert off["accepted_length"] == off["mean_window"] == 1
    assert compact["accepted_length"] > 1
    assert compact["ratio_to_off"] == compact["tokens_per_second"] / off["tokens_per_second"]


def test_mixed_traffic_stands_under_the_ceiling(measured):
    rows = measured[-1]["mixed_traffic"]
    assert [(row["concurrency"], row["workload"]) for row in rows] == [
        (USERS, "short"),
        (USERS, "long"),
    ]
    arms = {(arm["arm"], arm["concurrency"]): arm for arm in measured[-1]["arms"]}
    for row in rows:
        truth = arms["cap-accept", row["concurrency"]]["workloads"][row["workload"]]
        assert row["ceiling"] == truth["block_accept_length"] >= truth["accepted_length"]
        assert row["utilisation"] == pytest.approx(row["accepted_length"] / row["ceiling"])


def test_bounds_from_within_stand_beside_what_cap_accept_saw(measured):
    found = measured[-1]["verdicts"]
    assert [one["concurrency"] for one in found] == [USERS]
    arms = {(arm["arm"], arm["concurrency"]): arm for arm in measured[-1]["arms"]}
    for one in found:
        truth = arms["cap-accept", one["concurrency"]]
        compact = arms["compact", one["concurrency"]]
        assert one["full_blocks"] == truth["block_accept_length"]
        ratio = compact["accepted_length"] / truth["block_accept_length"]
        assert one["utilisation"] == pytest.approx(ratio)
        # greedy, by one cost table: both arms cut the same blocks
        assert one["bounds"]["compact"] == pytest.approx(one["bounds"]["cap-accept"])
        assert one["bounds"]["compact"]["held"]
    assert len(measured[0]["verdicts"]) == 0


def load_of(arm, lengths, **more):
    """An arm under a load of several workloads: window, accepted length and ceiling of each."""
    names = ("mean_window", "accepted_length", "block_accept_length")
    workloads = {name: dict(zip(names, figures, strict=True)) for name, figures in lengths.items()}
    whole = {"accepted_length": 2.0, "block_accept_length": 2.5}
    return {"arm": arm, "concurrency": 4, "workloads": workloads, "metrics": {}, **whole, **more}


def test_windows_are_judged_by_what_full_blocks_accept():
    easy, hard = (5.0, 3.0, 3.2), (3.0, 1.5, 1.6)
    cut = {"easy": easy, "hard": hard}
    arms = [load_of("compact", cut), load_of("cap-accept", cut)]
    assert verdicts(arms)[0]["windows_ordered"] is True
    full = {"easy": (8.0, 3.5, None), "hard": (8.0, 1.7, None)}
    arms.append(load_of("static", full))
    assert verdicts(arms)[0]["windows_ordered"] is True
    assert [row["full_length"] for row in mixed_traffic(arms)] == [3.5, 1.7]
    arms[-1] = load_of("static", {"easy": full["hard"], "hard": full["easy"]})
    assert verdicts(arms)[0]["windows_ordered"] is False
    alone = {"easy": easy}
    (found,) = verdicts([load_of("compact", alone), load_of("cap-accept", alone)])
    assert found["windows_ordered"] is None
    assert found["bounds"] == {}
    assert found["utilisation"] == 2.0 / 2.5


def test_bounds_that_do_not_hold_are_told(capsys):
    figures = {"spec_block_accept_length_low": 1.0, "spec_block_accept_length_high": 2.4}
    lengths = {"easy": (5.0, 3.0, 3.2)}
    arms = [load_of("compact", lengths, metrics=figures), load_of("cap-accept", lengths)]
    (found,) = verdicts(arms)
    assert found["bounds"] == {"compact": {"low": 1.0, "high": 2.4, "held": False}}
    facts = {"device": "d", "dtype": "float32", "temperature": 0.0}
    subcommand._print(SimpleNamespace(facts=facts, arms=arms), several=False)
    said = capsys.readouterr().out
    assert "at 4: utilisation 0.800; bounds of compact 1.000 to 2.400 DO NOT hold 2.500" in said


def test_figures_are_drawn_of_what_was_measured(measured, tmp_path):
    written = plots.draw_all(tmp_path, measured[-1]["arms"], BLOCK, "toy")
    curve = MeasuredCosts(np.array([1, 4, 8]), np.ones((3, 1)), largest_bucket=4)
    tiers = [TierCosts(requests, np.zeros(1), curve, curve) for requests in (1, 4)]
    samples = [{"kind": "verify", "requests": 4, "size": 2, "rows": 0, "seconds": [1]}]
    written.append(plots.draw_costs(tmp_path / "cost_curve.png", tiers, samples, "toy"))
    names = ["policy.png", "throughput_interactivity.png", "cost_curve.png"]
    assert [path.name for path in written] == names
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_fails_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, target, drafter, config):
            self.step_config = config

        def warmup(self, params):
            if self.step_config.mode == "off":
                raise RuntimeError("no memory")

        def reset_metrics(self):
            raise RuntimeError("lost")

    monkeypatch.setattr(bench, "Engine", Failing)
    monkeypatch.setattr(bench, "closed_loop", lambda *_: None)
    record = run(tmp_path / "raw.json", ("off", "static"))
    assert [(arm["arm"], arm["error"]) for arm in record.failed] == [
        ("off", "RuntimeError: no memory"),
        ("static", "RuntimeError: lost"),
    ]
    assert json.loads((tmp_path / "raw.json").read_text())["arms"] == record.arms


def test_users_ask_again_as_soon_as_they_are_answered():
    class Shop:
        """Answers the oldest request of each step."""

        def __init__(self):
            self.open, self.most, self.asked = [], 0, []

        def add(self, request):
            self.asked.append(request)
            self.open.append(len(self.asked) - 1)
            return self.open[-1]

        def step(self):
            self.most = max(self.most, len(self.open))
            assert len(self.open) == 3 or len(self.asked) == 7
            return {self.open.pop(0): Completion((1,), (2,), None, "stop", (), (), (1,), None)}

        def figures(self):
            return [SimpleNamespace(name="generation_tokens_total", value=len(self.asked) - 3)]

    shop = Shop()
    requests = [Request([index]) for index in range(7)]
    load = closed_loop(shop, requests, 3, clock=iter([10.0, 14.0, 18.0]).__next__)
    assert shop.asked == requests
    assert shop.most == 3
    assert len(load.answers) == 7
    assert (load.seconds, load.full_seconds, load.full_tokens) == (8.0, 4.0, 4)


def test_an_empty_answer_is_no_result():
    empty = Completion((1,), (), None, "context", (), (), (), None)
    shop = SimpleNamespace(
        add=lambda _: 0,
        step=lambda: {0: empty},
        figures=lambda: [SimpleNamespace(name="generation_tokens_total", value=0)],
    )
    with pytest.raises(RuntimeError, match="answer 0 is empty and ended by 'context'"):
        closed_loop(shop, [Request([1])], 1)


def test_ratios_compare_arms_of_one_load():
    arms = [
        {"arm": "off", "concurrency": 1, "tokens_per_second": 10.0},
        {"arm": "k=3", "concurrency": 1, "tokens_per_second": 20.0},
        {"arm": "compact", "concurrency": 1, "tokens_per_second": 30.0},
        {"arm": "k=3", "concurrency": 2, "error": "lost"},
        {"arm": "compact", "concurrency": 2, "tokens_per_second": 40.0},
    ]
    add_ratios(arms)
    assert (arms[2]["ratio_to_off"], arms[2]["ratio_to_best_fixed"]) == (3.0, 1.5)
    assert (arms[4]["ratio_to_off"], arms[4]["ratio_to_best_fixed"]) == (None, None)


def test_a_drafter_allows_depths_below_its_block_and_windows_with_a_head():
    def drafter(block_size, head):
        config = SimpleNamespace(block_size=block_size, enable_confidence_head=head)
        return SimpleNamespace(config=config, name="toy")

    assert allowed_arms(drafter(5, True)) == (
        *("off", "k=1", "k=2", "k=3", "static"),
        *("compact", "cap-accept"),
    )
    assert allowed_arms(drafter(8, False))[-2:] == ("k=7", "static")
    assert chosen_arms((), drafter(2, False), None) == ("off", "k=1", "static")
    for asked, table, says in (
        (("k=5",), None, "arm is 'k=5'.*block size 5 allows off, k=1"),
        (("off", "off"), None, "wanted each once"),
        (("compact",), None, "arm compact .* no --cost-table"),
        ((), None, "arm compact .* no --cost-table"),
    ):
        with pytest.raises(ValueError, match=says):
            chosen_arms(asked, drafter(5, True), table)


def test_arms_differ_in_nothing_but_their_setting():
    fixed = {"cost_table": None, "calibration": None, "bound_blocks": False}
    base = dataclasses.replace(BASE, k=None)
    assert arm_config(BASE, "off").k is None
    assert arm_config(base, "off") == dataclasses.replace(base, mode="off", **fixed)
    assert arm_config(base, "k=3") == dataclasses.replace(base, mode="static", k=3, **fixed)
    assert arm_config(base, "static") == dataclasses.replace(base, mode="static", **fixed)
    compact = arm_config(base, "compact")
    assert (compact.mode, compact.cost_table) == ("compact", BASE.cost_table)
    assert compact.bound_blocks


def test_requests_begin_again_where_the_prompts_end_with_seeds_of_their_own():
    own = Traffic([[1], [2]], ["a", "b"])
    requests = own.requests(3, dataclasses.replace(PARAMS, seed=5))
    assert [one.prompt for one in requests] == [[1], [2], [1]]
    assert [one.params.seed for one in requests] == [5, 6, 7]
    assert own.names(3) == ["a", "b", "a"]


class Letters:
    """Every token is a letter."""

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"[:VOCAB]

    def encode(self, text):
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.letters[i] for i in ids)

    def stream(self):
        return TextStream(self.decode)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`dspark bench` on the toy pair: the words before its other flags."""
    target = dataclasses.replace(TARGET, text=Letters())
    monkeypatch.setattr(resolve, "load_target", lambda name, dtype: target)
    monkeypatch.setattr(drafters, "load_drafter", lambda name, pair, dtype, **_: DRAFTER)
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": name * count}) for count in (1, 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    prompts = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    names = ["--target", "toy", "--drafter", "toy", "--out", str(tmp_path / "raw.json")]
    return ["bench", *names, "--prompts", *prompts]


def test_the_command_asks_files_in_turn_and_prints_a_table(command, tmp_path, capsys):
    flags = ["--arms", "off", "--concurrency", "1", "--rounds", "5", "--min-requests", "1"]
    figures = tmp_path / "figures"
    flags += ["--max-new-tokens", "4", "--page-size", "32", "--figures", str(figures)]
    assert main([*command, *flags]) == 0
    (arm,) = json.loads((tmp_path / "raw.json").read_text())["arms"]
    assert [row[:2] for row in arm["answers"]] == [
        ["one", 3],
        ["two", 3],
        ["one", 6],
        ["two", 6],
        ["one", 3],
    ]
    assert arm["workloads"].keys() == {"one", "two"}
    assert "tok/s a user" in capsys.readouterr().out
    assert (figures / "throughput_interactivity.png").exists()


def test_the_curves_that_decided_are_drawn_from_the_cost_table(command, tmp_path, monkeypatch):
    monkeypatch.setattr(subcommand, "run_arms", lambda *_, **__: None)
    table, figures = tmp_path / "costs.json", tmp_path / "figures"
    flat = {"contexts": [0], "verify": {"tokens": [1, 3], "seconds": [[1], [1]]}}
    flat |= {"draft": {"requests": [1], "seconds": [[1]]}, "largest_bucket": 3}
    session = {"device": jax.devices()[0].device_kind, "model": "summing", "dtype": "float32"}
    table.write_text(json.dumps({**session, "block_size": BLOCK, **flat}))
    flags = ["--arms", "compact", "--cost-table", str(table), "--figures", str(figures)]
    assert main([*command, *flags]) == 0
    assert (figures / "cost_curve.png").read_bytes().startswith(b"\x89PNG")


def test_prices_are_corrected_unless_blocks_are_bounded(command, tmp_path, monkeypatch):
    bases = []
    monkeypatch.setattr(subcommand, "run_arms", lambda *given, **_: bases.append(given[2]))
    flags = ["--arms", "compact", "--cost-table", str(tmp_path / "costs.json")]
    assert main([*command, *flags]) == main([*command, *flags, "--bound-blocks"]) == 0
    assert [(base.correct_costs, base.bound_blocks) for base in bases] == [
        (True, False),
        (False, True),
    ]


def test_arms_apart_are_given_what_they_look_at_and_one_that_dies_is_told(
    command, tmp_path, monkeypatch, capsys
):
    given = {}

    def measure(target, drafter, base, arms, loads, traffic, params, record, *, turn, **_):
        (arm,) = arms
        given[arm] = base.cost_table
        for users in loads:
            with turn(users):
                record.add({"arm": arm, "concurrency": users, "tokens_per_second": 1.0})

    def in_turn(arms, loads, work, after):
        for arm in arms:
            work(arm, at_once)
            after()
        return {"compact": "its process ended with exit code -9"}

    monkeypatch.setattr(subcommand, "run_arms", measure)
    monkeypatch.setattr(subcommand, "take_turns", in_turn)
    table = tmp_path / "costs.json"
    flags = ["--arms", "off", "compact", "--cost-table", str(table), "--concurrency", "1", "2"]
    assert main([*command, *flags, "--apart"]) == 1
    assert given == {"off": None, "compact": table}
    raw = json.loads((tmp_path / "raw.json").read_text())
    found = [(one["arm"], one.get("concurrency")) for one in raw["arms"]]
    assert found == [("off", 1), ("compact", 1), ("off", 2), ("compact", 2), ("compact", None)]
    assert raw["arms"][-1]["error"] == "its process ended with exit code -9"
    assert "compact FAILED" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--concurrency", "4", "1"], "concurrency is (4, 1); wanted increasing"),
        (["--concurrency", "0"], "concurrency is (0,)"),
        (["--rounds", "0"], "rounds is 0; wanted 1 or more"),
        (["--min-requests", "0"], "min-requests is 0"),
        (["--repeats", "0"], "repeats is 0; wanted 1 or more"),
        (["--arms", "k=9"], "arm is 'k=9'"),
        ([], "arm compact chooses windows by measured costs and no --cost-table"),
        (["--arms", "off", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--arms", "off", "--max-context", "5"], "request 2 has a prompt of 6 tokens"),
        (["--arms", "compact", "--cost-table", "nowhere.json"], "nowhere.json"),
        (["--arms", "off", "--cost-table", "x.json"], "--cost-table is given and no arm of off"),
        (["--arms", "off", "static", "--calibration", "x.json"], "--calibration is given and no"),
        (["--arms", "off", "--bound-blocks"], "--bound-blocks is given and no arm of off looks"),
        (["--out", "nowhere/raw.json"], "no folder"),
        (["--prompts", "a/x.jsonl", "b/x.jsonl"], "wanted each name once"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(
    command, flags, says, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "Engine", lambda *_: pytest.fail("an engine was made"))
    assert main([*command, *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_plot_library_is_named_with_its_extra(command, tmp_path, monkeypatch, capsys):
    def without(name):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("importlib.import_module", without)
    monkeypatch.setattr(entry, "load", lambda name: subcommand.bench)
    assert main([*command, "--figures", str(tmp_path / "figures")]) == 2
    assert "pip install 'dspark-jax[train]'" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_interactivity_is_the_speed_since_the_request_left_the_queue():
    def answer(tokens, seconds):
        service = Service(1.0, 2.0, seconds, 0, 0, None)
        ids = tuple(range(tokens))
        return Completion(
            (1,),
            ids,
            None,
            "length",
            (0,) * tokens,
            (0,) * tokens,
            (1,) * tokens,
            None,
            service=service,
        )

    load = Load([answer(10, 3.0), answer(10, 6.0), answer(10, 11.0)], 12.0, 0.0, 0)
    found = summarise(load, ["a"] * 3, "off")
    assert found["interactivity"] == 2.0
    assert found["full_tokens_per_second"] is None
    assert found["block_accept_length"] is None
