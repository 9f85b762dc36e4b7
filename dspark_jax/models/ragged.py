"""The ragged batch of query rows that every target model forwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.ragged_pack import ragged_pack


@flax.struct.dataclass
class Packed:
    """Query rows of several requests, packed one after another.

    A request owns up to ``W`` rows at consecutive positions; each row attends to the
    request's own committed rows and to its own earlier rows in this batch (causal).

    Attributes:
        tokens: ``[T]`` token ids, 0 in padding rows.
        request: ``[T]`` index into the rows of ``row`` (0..A-1); ``A`` in padding rows.
        position: ``[T]`` absolute position in the request's text; 0 in padding rows.
        row: ``[A, W]`` packed row holding the w-th query of request a; ``T`` where absent.
        slots: ``[A]`` cache slot of each request, or None when request a is slot a and A is
            the number of slots. An out-of-range slot marks a padding request.
        rectangular: True when row ``a*W + w`` is query w of request a, so that packing and
            unpacking are reshapes. Some of the rows may still be padding.
    """

    tokens: Int[Array, "T"]
    request: Int[Array, "T"]
    position: Int[Array, "T"]
    row: Int[Array, "A W"]
    slots: Int[Array, "A"] | None = None
    rectangular: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def parts(self) -> tuple[Packed]:
        """The batches of one shape that this one is made of: itself."""
        return (self,)

    def split(self, values: Array) -> list[Array]:
        """``[T, ...]`` by part."""
        return [values]

    def join(self, values: Iterable[Array]) -> Array:
        """The inverse of ``split``."""
        (only,) = values
        return only

    def unpack(self, values: Array, fill: float = 0.0) -> Array:
        """``[T, ...]`` packed rows to ``[A, W, ...]``; absent rows hold ``fill``."""
        if self.rectangular:
            return values.reshape(self.row.shape + values.shape[1:])
        return jnp.take(values, self.row, axis=0, mode="fill", fill_value=fill)

    def pack(self, values: Array) -> Array:
        """``[A, W, ...]`` to ``[T, ...]`` packed rows; padding rows hold 0."""
        width = self.row.shape[1]
        flat = values.reshape((-1, *values.shape[2:]))
        if self.rectangular:
            return flat
        source = self.request * width + self.within()
        return jnp.take(flat, source, axis=0, mode="fill", fill_value=0)

    def places(self) -> Int[Array, "A W"] | None:
        """Like ``row``, but each padding row is the place of an absent query, that all have one.

        None where row ``a*W + w`` is query w of request a.
        """
        if self.rectangular:
            return None
        requests, width = self.row.shape
        here = self.row < self.tokens.shape[0]
        count = here.sum(axis=1)
        ends = jnp.cumsum(count)
        # absent queries of the requests before, and of this one before query w
        before = jnp.arange(requests) * width - (ends - count)
        absent = before[:, None] + jnp.arange(width) - count[:, None]
        return jnp.where(here, self.row, ends[-1] + absent).astype(jnp.int32)

    def within(self) -> Int[Array, "T"]:
        """``[T]`` offset of each packed row inside its request's window (0 in padding)."""
        first = jnp.take(self.row[:, 0], self.request, mode="fill", fill_value=0)
        index = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        return jnp.where(self.request < self.row.shape[0], index - first, 0)

    def slot_of_row(self, slot_count: int) -> Int[Array, "T"]:
        """``[T]`` cache slot of each packed row; ``slot_count`` (dropped on write) in padding."""
        if self.slots is None:
            return jnp.where(self.request < self.row.shape[0], self.request, slot_count)
        return jnp.take(self.slots, self.request, mode="fill", fill_value=slot_count)


@flax.struct.dataclass
class Mixed:
    """Batches of different widths forwarded together, the rows of one after those of another.

    Windows of decoding requests and long pieces of prompts share the linear layers this way and
    unpack apart. Several requests of a part may name the same slot: pieces of one prompt at
    consecutive positions see each other as rows of one request do.
    """

    parts: tuple[Packed, ...]

    @property
    def tokens(self) -> Int[Array, "T"]:
        """Token ids of all rows."""
        return jnp.concatenate([part.tokens for part in self.parts])

    @property
    def position(self) -> Int[Array, "T"]:
        """Absolute positions of all rows."""
        return jnp.concatenate([part.position for part in self.parts])

    def slot_of_row(self, slot_count: int) -> Int[Array, "T"]:
        """As `Packed.slot_of_row`."""
        return jnp.concatenate([part.slot_of_row(slot_count) for part in self.parts])

    def split(self, values: Array) -> list[Array]:
        """``[T, ...]`` by part."""
        ends = list(itertools.accumulate(part.tokens.shape[0] for part in self.parts))
        return jnp.split(values, ends[:-1])

    def join(self, values: Iterable[Array]) -> Array:
        """The inverse of ``split``."""
        return jnp.concatenate(list(values))


# jitted so that steps share its trace, and a call by itself is one program
@jax.jit
def rectangle(
    tokens: Int[Array, "A W"],
    start: Int[Array, "A"],
    count: Int[Array, "A"],
    slots: Int[Array, "A"] | None = None,
) -> Packed:
    """Every request gets ``W`` rows at ``start``; rows at or past ``count`` are padding."""
    requests, width = tokens.shape
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    valid = offset < count[:, None]
    row = jnp.arange(requests * width, dtype=jnp.int32).reshape(requests, width)
    request = jnp.broadcast_to(jnp.arange(requests, dtype=jnp.int32)[:, None], valid.shape)
    return Packed(
        tokens=jnp.where(valid, tokens, 0).reshape(-1),
        request=jnp.where(valid, request, requests).reshape(-1),
        position=jnp.where(valid, start[:, None] + offset, 0).reshape(-1),
        row=row,
        slots=slots,
        rectangular=True,
    )


def compact(
    tokens: Int[Array, "S W"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    size: int,
) -> Packed:
    """The first ``count`` rows of each request, one request after another, in ``size`` rows.

    ``sum(count)`` must not exceed ``size``: the caller picks the bucket that holds it.
    """
    return Packed(*ragged_pack(tokens, start, count, size))
