"""Which implementation runs."""

import pytest

from pallas_kernels.choice import choose, plain


def chosen(asked=None, *, operation="op", obstacle=None):
    return choose(operation, "kernel", asked, "kernel", lambda: obstacle)


def test_nothing_asked_takes_the_kernel_where_it_can_run():
    assert chosen() == "kernel"
    assert chosen(obstacle="it is Tuesday") == "xla"


def test_a_kernel_that_was_asked_for_and_cannot_run_raises():
    with pytest.raises(NotImplementedError, match='op cannot run as "kernel": it is Tuesday'):
        chosen("kernel", obstacle="it is Tuesday")


def test_within_plain_named_operations_take_xla_unless_asked():
    with plain("op"):
        assert chosen() == "xla"
        assert chosen("kernel") == "kernel"
        assert chosen(operation="another") == "kernel"
        with plain("another"):
            assert chosen() == chosen(operation="another") == "xla"
    assert chosen() == "kernel"
