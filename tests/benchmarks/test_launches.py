"""Counting the kernels of a step in compiled text."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.launches import Launches, count_launches

TEXT = """HloModule jit_f, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%small (t: (f32[4])) -> f32[4] {
  %t = (f32[4]{0}) parameter(0)
  ROOT %g = f32[4]{0} get-tuple-element(%t), index=0
}

%large (t.1: (f32[4])) -> f32[4] {
  %t.1 = (f32[4]{0}) parameter(0)
  %g.1 = f32[4]{0} get-tuple-element(%t.1), index=0
  %f.1 = f32[4]{0} fusion(%g.1), kind=kLoop, calls=%fused
  ROOT %c.1 = f32[4]{0} custom-call(%f.1), custom_call_target="__cublas$gemm"
}

%inner_body (i: (f32[4])) -> (f32[4]) {
  %i = (f32[4]{0}) parameter(0)
  %gi = f32[4]{0} get-tuple-element(%i), index=0
  %fi = f32[4]{0} fusion(%gi), kind=kLoop, calls=%fused
  ROOT %ti = (f32[4]{0}) tuple(%fi)
}

%cond (c: (f32[4], s32[])) -> pred[] {
  %c = (f32[4]{0}, s32[]) parameter(0)
  ROOT %k = pred[] constant(true)
}

%body (b: (f32[4], s32[])) -> (f32[4], s32[]) {
  %b = (f32[4]{0}, s32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%b), index=0
  %s = s32[] get-tuple-element(%b), index=1
  %ti0 = (f32[4]{0}) tuple(%x)
  %w = (f32[4]{0}) while(%ti0), condition=%cond, body=%inner_body, TRIPS
  %y = f32[4]{0} conditional(%s, %w, %w), branch_computations={%small, %large}
  %cs = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%y)
  %cd = f32[4]{0} copy-done(%cs)
  ROOT %r = (f32[4]{0}, s32[]) tuple(%cd, %s)
}

ENTRY %main (m: (f32[4], s32[])) -> (f32[4], s32[]) {
  %m = (f32[4]{0}, s32[]) parameter(0)
  ROOT %loop = (f32[4]{0}, s32[]) while(%m), condition=%cond, body=%body
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')


def test_loops_branches_and_pairs_are_followed():
    # three turns of the inner loop, one copy, and none or two in the conditional
    assert count_launches(TEXT) == Launches(least=4, most=6)


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="no while loop"):
        count_launches("ENTRY %main (p: f32[]) -> f32[] {\n}\n")


def test_what_this_compiler_writes_can_be_read():
    matrix = jnp.eye(4)

    @jax.jit
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x @ matrix) + 1, x)

    found = count_launches(loop.lower(jnp.zeros((4, 4))).compile().as_text())
    assert 1 <= found.least == found.most <= 8
