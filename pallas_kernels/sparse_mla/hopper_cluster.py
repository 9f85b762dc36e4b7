"""Two blocks of a cluster that fill each other's key tiles, in PTX.

Both attend over the same keys. Each dequantises one half of a tile's rows and stores them twice:
in its own shared memory, and with ``st.async`` in that of its peer, whose barrier counts the
bytes. So a slot is ready once its own threads have arrived and the peer's bytes have landed, and
free once the warps of both blocks have read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mlir

from pallas_kernels.sparse_mla.hopper_ptx import COPYING_THREADS, barrier, i32, lane_0, ptx, value

BLOCKS = 2
"""Of a cluster."""


def rank() -> Any:
    """Number of the calling block in its cluster."""
    return value("mov.u32 $0, %cluster_ctarank;")


def at_peer(address: Any) -> Any:
    """The address in the peer's shared memory of what lies at ``address`` in one's own."""
    return value("mapa.shared::cluster.u32 $0, $1, $2;", address, arith.xori(rank(), i32(1)))


def meet() -> None:
    """Every thread of both blocks waits here for all others."""
    ptx("barrier.cluster.arrive.release.aligned;")
    ptx("barrier.cluster.wait.acquire.aligned;")


def wait(words: Any, index: int, parity: Any) -> None:
    """Until the phase of that parity is over, and what both blocks did before is seen."""
    ptx(
        "{ .reg .pred done; again: "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
        "@!done bra again; }",
        *(barrier(words, index), parity),
    )


def arrive_at_peer(words: Any, index: int) -> None:
    """One arrival of the calling warp."""
    ptx(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];",
        at_peer(barrier(words, index)),
        predicate=lane_0(),
    )


def arrive_expecting(words: Any, index: int, size: int) -> None:
    """An arrival of every copying thread, the first of which announces the peer's bytes."""
    at = barrier(words, index)
    thread = arith.remui(mlir.thread_idx(), i32(COPYING_THREADS))
    first = arith.cmpi(arith.CmpIPredicate.eq, thread, i32(0))
    others = arith.xori(first, arith.constant(ir.IntegerType.get_signless(1), 1))
    ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", at, predicate=first)
    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", at, predicate=others)


def store_at_peer(place: Any, offset: int, words: Sequence[Any], landing: Any) -> None:
    """16 bytes; ``landing`` is the address of the peer's barrier that counts them."""
    ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        f"[$0+{offset}], {{$1, $2, $3, $4}}, [$5];",
        *(place, *words, landing),
    )
