"""Lowering for a GPU that is not there."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh


@pytest.fixture(scope="session")
def lowered_for_hopper() -> Callable[..., str]:
    """The program of a function on operands of these shapes, as text, lowered for an H200."""

    def lowered(run: Callable[..., Any], *operands: Any) -> str:
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            return jax.jit(run).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()

    return lowered
