"""What decoding asks of a target model: a module of pure functions with these signatures.

A target is a frozen config whose ``family`` attribute is such a module. ``dense`` is one;
``testing.toy`` holds another.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from dspark_jax.models.pages import PagePool
from dspark_jax.models.ragged import Packed

Weights = Any
Cache = Any


class TargetFamily(Protocol):
    """Functions of a target family. ``config`` is always the static first argument."""

    def init_cache(self, config: Any, slots: int, capacity: int, dtype: Any) -> Cache:
        """An empty cache: ``slots`` requests of ``capacity`` rows each; ``length`` all 0."""
        ...

    def init_pages(self, config: Any, slots: int, pool: PagePool, dtype: Any) -> Cache:
        """An empty paged cache with a ``table`` (``models.pages``). Only the engine asks for it.

        What a cache keeps by slot and not in pages lies where its ``ring_table`` ``[S, 1]``
        says. A family with such a cache names those rows in ``BESIDE_PAGES``: its pages alone
        do not bring a text back, so that no request takes over those of another.
        """
        ...

    def forward(
        self, config: Any, weights: Weights, cache: Cache, packed: Packed, *, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], Cache]:
        """Run packed rows, write their cache rows, leave ``cache.length`` alone.

        A family with ``init_pages`` takes `models.ragged.Mixed` for ``packed`` as well.
        Returns hidden states after the final norm, the concatenated outputs of the layers in
        ``taps`` (-1 = embedding output, i = residual stream after layer i), and the cache.
        """
        ...

    def unembed(
        self, config: Any, weights: Weights, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """fp32 logits of final hidden states."""
        ...

    def best_tokens(
        self, config: Any, weights: Weights, hidden: Float[Array, "T D"]
    ) -> Int[Array, "T"]:
        """The most likely token of each row, the lowest id among equals."""
        ...

    def commit(self, config: Any, cache: Cache, length: Int[Array, "S"]) -> Cache:
        """Set the committed length of every slot; rows past it become scratch."""
        ...

    def output_embedding(self, weights: Weights) -> Float[Array, "V D"]:
        """The matrix a drafter borrows as its head."""
        ...

    def input_embedding(self, weights: Weights) -> Float[Array, "V D"]:
        """The matrix a drafter borrows as its embedding."""
        ...
