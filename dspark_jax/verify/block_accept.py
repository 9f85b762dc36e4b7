"""What full blocks would have committed, bounded from inside a run that verifies only windows.

A block whose window was all accepted is *censored*: how many of its other drafts the target would
have taken is not known. But the rows that are verified next judge them, as long as the text goes on
as drafted: draft k is accepted with probability min(1, p_k/q_k), given all before it, and p_k is in
the row whose context is the drafts before k. The first of them is always known: its row is the one
that the bonus token comes from. Where the text leaves the drafts the rest stays unknown, between
none and all. Per block the bounds hold the expectation; that the anchors visited under trimming are
like those that full blocks would visit is assumed. (The estimator of SGLang's DSpark; here greedy
and filtered requests are bounded too.)
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.ragged import Packed
from dspark_jax.verify.accept import Sampling, target_scores


class OpenBlocks(flax.struct.PyTreeNode):
    """Censored blocks being followed, at most one a step of the last G, P = G places.

    Attributes:
        tokens: drafts of each block.
        logprob: log q of each draft; 0 where every request is greedy.
        start: position of the block's anchor.
        full: drafts that a full block would have had verified.
        next: first draft not judged yet, from 1; 0 in a place without a block.
        survival: product of the judged acceptances.
        length: tokens so far, window and anchor included: the lower bound.
        expected: position of the slot's next anchor, if its text goes on.
    """

    tokens: Int[Array, "S P G"]
    logprob: Float[Array, "S P G"]
    start: Int[Array, "S P"]
    full: Int[Array, "S P"]
    next: Int[Array, "S P"]
    survival: Float[Array, "S P"]
    length: Float[Array, "S P"]
    expected: Int[Array, "S"]


@flax.struct.dataclass
class Bounds:
    """Blocks of which all is known that will be, by slot.

    Attributes:
        blocks: how many.
        low, high: tokens that full verification would have committed, bonus included; summed.
    """

    blocks: Int[Array, "S"]
    low: Float[Array, "S"]
    high: Float[Array, "S"]


@flax.struct.dataclass
class Block:
    """What one step did to each request.

    Attributes:
        active: requests that took the step.
        step: of each request; picks the place of a block.
        anchor: position of the anchor's row.
        tokens: committed tokens; the first ``count`` are real.
        count: committed tokens.
        drafts: the block's drafts.
        logprob: log q of them; None when every request is greedy.
        window: drafts verified for commitment.
        committed: drafts accepted inside the window.
        full: drafts that full verification would have looked at.
        stopped: requests that ended at a stop id.
        ended: requests that ended.
    """

    active: Bool[Array, "S"]
    step: Int[Array, "S"]
    anchor: Int[Array, "S"]
    tokens: Int[Array, "S W"]
    count: Int[Array, "S"]
    drafts: Int[Array, "S G"]
    logprob: Float[Array, "S G"] | None
    window: Int[Array, "S"]
    committed: Int[Array, "S"]
    full: Int[Array, "S"]
    stopped: Bool[Array, "S"]
    ended: Bool[Array, "S"]


def no_blocks(slots: int, depth: int) -> OpenBlocks:
    """Nothing is followed."""
    ints = lambda *shape: jnp.zeros((slots, *shape), jnp.int32)  # noqa: E731
    floats = lambda *shape: jnp.zeros((slots, *shape), jnp.float32)  # noqa: E731
    return OpenBlocks(
        tokens=ints(depth, depth),
        logprob=floats(depth, depth),
        start=ints(depth),
        full=ints(depth),
        next=ints(depth),
        survival=floats(depth),
        length=floats(depth),
        expected=jnp.full((slots,), -1, jnp.int32),
    )


def follow(
    blocks: OpenBlocks,
    block: Block,
    logits: Float[Array, "T V"] | None,
    best: Int[Array, "T"],
    packed: Packed,
    sampling: Sampling,
    *,
    filtered: bool,
) -> tuple[OpenBlocks, Bounds]:
    """Open the blocks that this step cut, judge what its rows can judge, close what is known.

    ``best`` are the most likely tokens of the rows, and all that greedy requests are judged by;
    ``logits`` may be None when every request is greedy.
    """
    low = jnp.zeros(block.active.shape, jnp.float32)
    total = Bounds(jnp.zeros_like(block.count), low, low)

    def close(which: Array, tail: Array) -> None:
        nonlocal blocks, total
        total = Bounds(
            total.blocks + which.sum(axis=1),
            total.low + jnp.where(which, blocks.length, 0.0).sum(axis=1),
            total.high + jnp.where(which, blocks.length + tail, 0.0).sum(axis=1),
        )
        blocks = blocks.replace(next=jnp.where(which, 0, blocks.next))

    def unknown() -> Array:
        return blocks.survival * (blocks.full - blocks.next + 1)

    # a slot whose text does not go on: its request was taken away
    gone = block.active & (blocks.expected != block.anchor)
    close((blocks.next > 0) & gone[:, None], unknown())

    certain = block.count <= block.committed  # an accepted stop
    censored = block.active & ~certain & (block.committed == block.window)
    censored &= block.window < block.full
    exact = block.active & ~censored
    total = Bounds(
        total.blocks + exact,
        total.low + jnp.where(exact, block.count, 0),
        total.high + jnp.where(exact, block.count, 0),
    )
    blocks = _open(blocks, block, censored)

    scores = normalizer = None
    if block.logprob is not None:
        assert logits is not None
        owner = jnp.minimum(packed.request, block.count.shape[0] - 1)
        own = jax.tree.map(lambda field: field[owner], sampling)
        scores = target_scores(logits, own, filtered=filtered)
        normalizer = jax.nn.logsumexp(scores, axis=-1)
    for at in range(packed.row.shape[1]):
        number = block.anchor[:, None] + at + 1 - blocks.start
        judged = (blocks.next > 0) & (number == blocks.next) & (at < block.count)[:, None]
        column = jnp.clip(number - 1, 0, blocks.tokens.shape[-1] - 1)[..., None]
        token = jnp.take_along_axis(blocks.tokens, column, axis=-1)[..., 0]
        row = jnp.minimum(packed.row[:, at], best.shape[0] - 1)[:, None]
        acceptance = (token == best[row]).astype(jnp.float32)
        if scores is not None and normalizer is not None:
            drawn = jnp.take_along_axis(blocks.logprob, column, axis=-1)[..., 0]
            ratio = jnp.exp(jnp.minimum(scores[row, token] - normalizer[row] - drawn, 0.0))
            acceptance = jnp.where(sampling.greedy[:, None], acceptance, ratio)
        survival = jnp.where(judged, blocks.survival * acceptance, blocks.survival)
        blocks = blocks.replace(
            survival=survival,
            length=blocks.length + jnp.where(judged, survival, 0.0),
            next=blocks.next + judged,
        )
        left = judged & (block.tokens[:, at][:, None] != token)
        close(left, unknown())
        close(judged & (blocks.next > blocks.full), jnp.zeros_like(survival))

    tail = jnp.where(block.stopped[:, None], 0.0, unknown())
    close((blocks.next > 0) & (block.active & block.ended)[:, None], tail)
    expected = jnp.where(block.active, block.anchor + block.count, blocks.expected)
    return blocks.replace(expected=expected), total


def _open(blocks: OpenBlocks, block: Block, censored: Bool[Array, "S"]) -> OpenBlocks:
    """Put this step's censored blocks in their places."""
    places = blocks.next.shape[1]
    # a block is judged in one row a step at least, so it has left its place after G steps
    here = censored[:, None] & (jnp.arange(places) == (block.step % places)[:, None])

    def put(old: Array, new: Array) -> Array:
        return jnp.where(here.reshape(here.shape + (1,) * (old.ndim - 2)), new[:, None], old)

    logprob = jnp.zeros(block.drafts.shape) if block.logprob is None else block.logprob
    return blocks.replace(
        tokens=put(blocks.tokens, block.drafts),
        logprob=put(blocks.logprob, logprob),
        start=put(blocks.start, block.anchor),
        full=put(blocks.full, block.full),
        next=put(blocks.next, block.window + 1),
        survival=put(blocks.survival, jnp.ones_like(block.count, jnp.float32)),
        length=put(blocks.length, (block.window + 1).astype(jnp.float32)),
    )
