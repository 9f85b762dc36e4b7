"""The indexer's operations as each of their implementations, interpreted where there is no GPU."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import pallas_kernels.indexer_logits
import pallas_kernels.top_k  # noqa: F401
from pallas_kernels.indexer_logits.pallas_triton import Tuning as LogitsTuning
from pallas_kernels.top_k.pallas_triton import Tuning as TopKTuning

SMALL: dict[str, Any] = {
    "indexer_logits": LogitsTuning(keys=64, warps=4, tokens=8),
    "top_k": TopKTuning(tile=32, sample=16, least_kept=32, warps=4),
}
"""Cuts in which a few rows and keys take more than one program."""


@pytest.fixture(params=["xla", "interpreted", pytest.param("triton", marks=pytest.mark.gpu)])
def indexer_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How the indexer of a model computes while a test runs; the test must make it compute."""
    ran = set()

    def noted(name: str, kernel: Any, *operands: Any) -> Any:
        ran.add(name)
        return kernel(*operands, tuning=SMALL[name], interpret=request.param == "interpreted")

    for name in SMALL:
        api = sys.modules[f"pallas_kernels.{name}.api"]
        if request.param == "xla":
            monkeypatch.setattr(api, "AUTOMATIC", "xla")
        if request.param == "interpreted":
            monkeypatch.setattr(api, "missing_hopper", lambda: None)
        triton = sys.modules[f"pallas_kernels.{name}.pallas_triton"]
        monkeypatch.setattr(triton, name, functools.partial(noted, name, getattr(triton, name)))
    yield request.param
    assert ran == (set() if request.param == "xla" else set(SMALL))
