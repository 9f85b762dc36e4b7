"""What a profile times is what an engine runs, and an engine of the same kind takes its table."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.cli import main as entry
from dspark_jax.cli import profile as subcommand
from dspark_jax.cli.main import main
from dspark_jax.engine import cost_profile
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine
from dspark_jax.testing import summing
from tests.engine.small import BLOCK, DRAFTER, TARGET

CONFIG = EngineConfig(max_requests=1, max_context=40, mode="compact", page_size=8)
FLAGS = ["--max-requests", "1", "--max-context", "40", "--page-size", "8", "--dtype", "float32"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The table that the command writes, its plot, and the row counts of every program it ran."""
    out = tmp_path_factory.mktemp("profile") / "costs.json"
    plot = out.with_suffix(".png")
    executed = set()
    for rows in (1, 1000):
        cost_profile._verify(rows).clear_cache()  # sizes are noted when they are traced
    plain = summing.forward

    def forward(config, weights, cache, packed, *, taps):
        executed.add(packed.tokens.shape[0])
        return plain(config, weights, cache, packed, taps=taps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "forward", forward)
        patch.setattr(cost_profile, "LEAST_SECONDS", 1e-4)
        patch.setattr(resolve, "load_target", lambda name, dtype: TARGET)
        patch.setattr(drafters, "load_drafter", lambda name, pair, dtype, **_: DRAFTER)
        command = ["profile", "--target", "summing", "--drafter", "summing", "--out", str(out)]
        assert main([*command, *FLAGS, "--plot", str(plot)]) == 0
    return out, plot, executed


def test_every_bucket_and_what_rides_beside_it_is_timed_at_its_own_size(measured):
    out, _, executed = measured
    table = json.loads(out.read_text())
    (tier,) = table["tiers"]
    full = BLOCK + 1
    assert tier["verify"]["tokens"] == sorted(executed) == [1, 2, full, full + 16, full + 64]
    assert (tier["requests"], tier["largest_bucket"]) == (1, full)
    assert tier["contexts"] == [4, 18, 37]
    for seconds in (tier["verify"]["seconds"], tier["draft"]):
        assert (np.asarray(seconds) > 0).all()
    assert all(len(one["seconds"]) == 5 for one in table["samples"])
    assert tier["walk"]["depths"] == [1, BLOCK]
    assert tier["walk"]["shares"][0] > 0
    assert tier["walk"]["shares"][-1] == 1
    assert len(table["samples"]) == (len(executed) + BLOCK) * len(tier["contexts"])


def test_sizes_take_turns_so_that_a_slow_while_is_slow_for_all(monkeypatch):
    monkeypatch.setattr(cost_profile, "LEAST_SECONDS", 0.0)
    order = []

    def run_of(name):
        def run(state, steps):
            order.append(name)
            return state

        return run

    seconds = cost_profile._seconds_a_step([run_of("a"), run_of("b")], jnp.zeros(()))
    assert "".join(order) == "aaabbb" + "ab" * cost_profile.REPEATS
    assert [len(one) for one in seconds] == [cost_profile.REPEATS] * 2


def test_a_timing_covers_enough_steps_whatever_came_between(monkeypatch):
    clock, launched = [0.0], []
    monkeypatch.setattr(cost_profile.time, "perf_counter", lambda: clock[0])

    def run(state, steps):
        # a launch costs as much as its step, and something long came into the first that is timed
        launched.append(int(steps))
        clock[0] += 1e-3 * int(steps) + 1e-3 + (0.1 if len(launched) == 2 else 0.0)
        return state

    (seconds,) = cost_profile._seconds_a_step([run], jnp.zeros(()))
    assert launched[:3] == [1, 1, 1]
    assert set(launched[3:]) == {10}
    assert seconds == pytest.approx([1.1e-3] * cost_profile.REPEATS)


def test_timings_and_curves_are_drawn(measured):
    _, plot, _ = measured
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_row_count_of_several_tiers_is_timed_with_the_requests_of_each(monkeypatch):
    ran = []

    def note(runs, state):
        ran.extend([state.slots] * len(runs))
        return [[1.0]] * len(runs)

    monkeypatch.setattr(cost_profile, "_seconds_a_step", note)
    monkeypatch.setattr(cost_profile, "compile_together", lambda *_: None)
    config = dataclasses.replace(
        CONFIG, max_requests=4, batch_tiers=(2, 4), max_batched_tokens=4 * (BLOCK + 1) + 16
    )
    table = cost_profile.profile(TARGET, DRAFTER, config)
    tokens = [(tier["requests"], tier["verify"]["tokens"]) for tier in table["tiers"]]
    assert tokens == [(2, [2, 3, 4, 6, 6 + 16]), (4, [4, 6, 9, 12, 12 + 16])]
    assert [tier["contexts"][-1] for tier in table["tiers"]] == [2 * 37, 4 * 37]
    assert ran == [2] * 7 * 3 + [4] * 7 * 3, "five sizes and two depths, at three contexts"


@pytest.mark.parametrize("change", [{"policy": "causal"}, {"threshold": 0.5}, {}])
def test_plain_decoding_is_timed_beside_any_tiers_whoever_decides_windows(monkeypatch, change):
    monkeypatch.setattr(cost_profile, "_seconds_a_step", lambda runs, _: [[1.0]] * len(runs))
    monkeypatch.setattr(cost_profile, "compile_together", lambda *_: None)
    config = dataclasses.replace(CONFIG, token_tiers=(2,), **change)
    (tier,) = cost_profile.profile(TARGET, DRAFTER, config)["tiers"]
    full = BLOCK + 1
    assert tier["verify"]["tokens"] == [1, 2, full, full + 16, full + 64]


def test_an_engine_of_the_same_kind_serves_by_the_table(measured):
    out, *_ = measured
    engine = Engine(TARGET, DRAFTER, dataclasses.replace(CONFIG, cost_table=out))
    tables = engine._programs.tables(1, 0)
    assert tables.known
    assert (jnp.diff(tables.verify, axis=1) >= 0).all()
    beside_prompts = engine._programs.tables(1, 16)
    assert (beside_prompts.verify[:, 0] >= tables.verify[:, -1]).all()


def test_a_table_of_another_model_is_refused(measured):
    out, *_ = measured
    other = dataclasses.replace(TARGET, name="other")
    with pytest.raises(ValueError, match=r"measured for model 'summing'.*runs model 'other'"):
        Engine(other, DRAFTER, dataclasses.replace(CONFIG, cost_table=out))


@pytest.mark.parametrize("missing", ["--out", "--plot"])
def test_what_could_not_be_written_is_refused_before_anything_is_loaded(tmp_path, capsys, missing):
    files = {"--out": tmp_path / "costs.json", "--plot": tmp_path / "costs.png"}
    files[missing] = tmp_path / "nowhere" / "file"
    words = [word for flag, file in files.items() for word in (flag, str(file))]
    assert main(["profile", "--target", "x", "--drafter", "y", *words]) == 2
    assert "no folder" in capsys.readouterr().err


def test_a_plot_without_its_library_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, capsys
):
    def without(name):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("importlib.import_module", without)
    monkeypatch.setattr(entry, "load", lambda name: subcommand.profile)
    out, plot = str(tmp_path / "costs.json"), str(tmp_path / "costs.png")
    command = ["profile", "--target", "x", "--drafter", "y", "--out", out, "--plot", plot]
    assert main(command) == 2
    assert "pip install 'dspark-jax[train]'" in capsys.readouterr().err


def test_only_steps_that_compare_costs_are_profiled():
    with pytest.raises(ValueError, match="mode is 'static'; wanted \"compact\""):
        cost_profile.profile(TARGET, DRAFTER, dataclasses.replace(CONFIG, mode="static"))
