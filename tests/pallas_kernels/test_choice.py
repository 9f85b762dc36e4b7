"""Which implementation runs."""

import jax
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


def test_a_jitted_function_is_traced_anew_within():
    chosen_in_trace = []
    outer = jax.jit(lambda x: jax.jit(inner)(x))

    def inner(x):
        chosen_in_trace.append(chosen())
        return x

    outer(1.0)
    with preferring(op="xla"):
        outer(1.0)
    outer(1.0)
    assert chosen_in_trace == ["kernel", "xla"]


def test_a_preferred_kernel_that_cannot_run_is_not_taken():
    with preferring(op="kernel"):
        assert choose("op", "kernel", None, "xla", lambda: None) == "kernel"
        assert choose("op", "kernel", None, "xla", lambda: "it is Tuesday") == "xla"
