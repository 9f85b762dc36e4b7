"""What the host needs for a step."""

import pytest

from dspark_jax.engine.host_time import RECENT, HostTime


def test_between_dispatches_counts_what_was_not_waiting():
    host = HostTime()
    assert host.step == 0.0
    host.dispatched(10.0, 4)
    assert host.step == 0.0, "nothing to compare with"
    host.waited(3.0)
    host.dispatched(15.0, 4)
    assert host.step == pytest.approx((5.0 - 3.0) / 4)


def test_a_pause_and_a_time_without_work_change_nothing():
    host = HostTime()
    for index in range(RECENT):
        host.dispatched(float(index), 2)
    assert host.step == 0.5
    host.dispatched(1000.0, 2)
    assert host.step == 0.5, "a median"
    host.idle()
    for index in range(RECENT):
        host.dispatched(2000.0 + index, 2)
        host.idle()
    assert host.step == 0.5
