"""Which implementation runs."""

import pytest

from pallas_kernels.choice import choose, preferring


def chosen(asked=None, *, operation="op", obstacle=None):
    return choose(operation, "kernel", asked, "kernel", lambda: obstacle)


def test_nothing_asked_takes_the_kernel_where_it_can_run():
    assert chosen() == "kernel"
    assert chosen(obstacle="it is Tuesday") == "xla"


def test_a_kernel_that_was_asked_for_and_cannot_run_raises():
    with pytest.raises(NotImplementedError, match='op cannot run as "kernel": it is Tuesday'):
        chosen("kernel", obstacle="it is Tuesday")


def test_what_is_preferred_is_taken_within_unless_another_is_asked_for():
    with preferring(op="xla"):
        assert chosen() == "xla"
        assert chosen("kernel") == "kernel"
        assert chosen(operation="another") == "kernel"
        with preferring(another="xla"):
            assert chosen() == chosen(operation="another") == "xla"
    assert chosen() == "kernel"


def test_a_preferred_kernel_that_cannot_run_is_not_taken():
    with preferring(op="kernel"):
        assert choose("op", "kernel", None, "xla", lambda: None) == "kernel"
        assert choose("op", "kernel", None, "xla", lambda: "it is Tuesday") == "xla"
