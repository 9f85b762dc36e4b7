"""Time of a step by part: scopes in a compiled text, and spans within spans."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.step_parts import REST, Span, add_up, own_times, part_seconds, parts_of

SCOPES = ("outer", "inner")


@pytest.fixture(scope="module")
def program():
    """A loop in a scope, a product in a scope within another, and a sort in none."""

    def run(x):
        with jax.named_scope("outer"):
            x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ x), x)
            with jax.named_scope("inner"):
                x = x @ x.T
        return jnp.sort(x, axis=0)

    return jax.jit(run).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()


def test_an_instruction_belongs_to_the_scopes_it_was_traced_in(program):
    parts = parts_of(program.as_text(), SCOPES)
    assert {"outer", "outer/inner", REST} <= set(parts.values())


def test_a_loop_has_the_time_that_its_body_leaves_it():
    spans = [Span("loop", 0, 10), Span("a", 1, 4), Span("b", 4, 9), Span("after", 10, 12)]
    assert sorted(own_times(spans)) == [("a", 3), ("after", 2), ("b", 5), ("loop", 2)]


def test_seconds_add_up_over_lines_and_unknown_instructions_are_the_rest():
    lines = [[Span("a", 0, 3e9), Span("b", 3e9, 4e9)], [Span("a", 0, 1e9)]]
    assert add_up(lines, {"a": "outer"}) == {"outer": 4.0, REST: 1.0}


def test_a_profile_without_a_kernel_of_the_program_is_no_result():
    with pytest.raises(RuntimeError, match="no kernel of the program; wanted one recorded"):
        add_up([[Span("another", 0, 1)]], {"a": "outer"})


def test_a_profiled_call_has_time_in_its_scopes(program):
    x = jnp.ones((64, 64))
    seconds = part_seconds(lambda: program(x), program.as_text(), SCOPES)
    assert seconds["outer"] > 0
