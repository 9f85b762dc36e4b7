"""Programs are compiled as suits the rows of their products."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.compiling import FEW_ROWS, jit_for_rows


def test_programs_of_many_rows_alone_have_options_of_their_own():
    doubled = jit_for_rows(lambda x: 2 * x)
    x = jnp.ones(3)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        assert doubled(rows)(x).sum() == 6
    assert jax.jit(lambda x: doubled(FEW_ROWS)(x))(x).sum() == 6
    # an inner program cannot have options
    with pytest.raises(ValueError, match="xla_gpu_enable_triton_gemm"):
        jax.jit(lambda x: doubled(FEW_ROWS + 1)(x))(x)
