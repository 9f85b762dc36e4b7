"""How many steps of a dispatch hide the host's work."""

import pytest

from dspark_jax.engine.pace import MOST_STEPS, Pace


def paced(host, step, times=1):
    pace = Pace()
    for _ in range(times):
        pace.worked(host)
        pace.stepped(step)
    return pace


def test_until_both_times_are_known_dispatches_are_long():
    pace = Pace()
    assert pace.steps == MOST_STEPS
    pace.worked(1e-3)
    assert pace.steps == MOST_STEPS
    pace.stepped(1.0)
    assert pace.steps == 1


@pytest.mark.parametrize(
    ("host", "step", "steps"),
    [(0.1, 1.0, 1), (1.0, 1.0, 2), (2.1, 1.0, 4), (99.0, 1.0, MOST_STEPS)],
)
def test_the_device_gets_half_as_much_again_as_the_host_takes(host, step, steps):
    assert paced(host, step).steps == steps


def test_one_slow_turn_of_the_host_changes_little():
    pace = paced(1.0, 1.0, times=100)
    pace.worked(4.0)
    assert pace.steps == 2
    for _ in range(50):
        pace.worked(4.0)
    assert pace.steps == 6
