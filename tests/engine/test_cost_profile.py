"""What a profile times is what an engine runs, and an engine of the same kind takes its table."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.cli.main import main
from dspark_jax.engine import cost_profile
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.engine import Engine, served_step
from dspark_jax.testing import summing
from tests.engine.small import BLOCK, DRAFTER, TARGET

CONFIG = EngineConfig(max_requests=1, max_context=40, mode="compact", page_size=8)
FLAGS = ["--max-requests", "1", "--max-context", "40", "--page-size", "8", "--dtype", "float32"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The table that the command writes, and the row counts of every program it ran."""
    out = tmp_path_factory.mktemp("profile") / "costs.json"
    executed = set()
    cost_profile._verify.clear_cache()  # sizes are noted when they are traced
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
        assert main([*command, *FLAGS]) == 0
    return out, executed


def test_every_bucket_is_timed_at_its_own_size(measured):
    out, executed = measured
    table = json.loads(out.read_text())
    assert table["verify"]["tokens"] == sorted(executed) == [1, BLOCK + 1]
    assert table["largest_bucket"] == BLOCK + 1
    assert table["draft"]["requests"] == [1]
    assert table["contexts"] == [4, 18, 37]
    for part in ("verify", "draft"):
        assert (np.asarray(table[part]["seconds"]) > 0).all()
    assert all(len(one["seconds"]) == 5 for one in table["samples"])


def test_a_size_of_several_batches_is_timed_with_the_most_requests():
    config = dataclasses.replace(CONFIG, max_requests=4)
    step = served_step(TARGET, DRAFTER, config)
    sizes = cost_profile.requests_by_size(step, config)
    assert sizes == {1: 1, 3: 1, 4: 4, 6: 4, 12: 4}


def test_an_engine_of_the_same_kind_serves_by_the_table(measured):
    out, _ = measured
    engine = Engine(TARGET, DRAFTER, dataclasses.replace(CONFIG, cost_table=out))
    tables = engine._programs.tables(1, 0)
    assert tables.known
    assert (jnp.diff(tables.verify, axis=1) >= 0).all()
    beside_prompts = engine._programs.tables(1, 8)
    assert (beside_prompts.verify[:, 0] >= tables.verify[:, -1]).all()


def test_a_table_of_another_model_is_refused(measured):
    out, _ = measured
    other = dataclasses.replace(TARGET, name="other")
    with pytest.raises(ValueError, match=r"measured for model 'summing'.*runs model 'other'"):
        Engine(other, DRAFTER, dataclasses.replace(CONFIG, cost_table=out))


def test_a_table_that_could_not_be_written_is_refused_before_anything_is_loaded(tmp_path, capsys):
    out = tmp_path / "nowhere" / "costs.json"
    command = ["profile", "--target", "x", "--drafter", "y", "--out", str(out)]
    assert main(command) == 2
    assert "no folder" in capsys.readouterr().err


def test_only_steps_that_compare_costs_are_profiled():
    with pytest.raises(ValueError, match="mode is 'static'; wanted \"compact\""):
        cost_profile.profile(TARGET, DRAFTER, dataclasses.replace(CONFIG, mode="static"))
