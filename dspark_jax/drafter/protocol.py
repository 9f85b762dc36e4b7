"""What decoding asks of a drafter: a module of pure functions with these signatures.

A drafter is a frozen config whose ``family`` attribute is such a module, with the fields
``block_size``, ``vocab_size``, ``draft_vocab_size``, ``target_layer_ids`` and
``enable_confidence_head``. Its weights have the attribute ``draft_to_target``: the target id of
every draft-vocabulary column, or None when the vocabularies are the same. ``dspark`` is one;
``testing`` holds an oracle and an adversary.
``embed`` and ``head`` are the target's matrices, used when the drafter brings none.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from dspark_jax.models.pages import PagePool


class DrafterFamily(Protocol):
    """Functions of a drafter family. ``config`` is always the static first argument."""

    def init_context(self, config: Any, slots: int, capacity: int, dtype: Any) -> Any:
        """An empty context cache for ``slots`` requests of ``capacity`` rows."""
        ...

    def init_context_pages(self, config: Any, slots: int, pool: PagePool, dtype: Any) -> Any:
        """An empty paged context cache with a ``table``. Only the engine asks for it.

        ``ring_table`` and ``BESIDE_PAGES`` as in ``models.protocol``.
        """
        ...

    def commit_context(
        self,
        config: Any,
        weights: Any,
        context: Any,
        taps: Float[Array, "T nDt"],
        slot: Int[Array, "T"],
        position: Int[Array, "T"],
    ) -> Any:
        """Project taps, write one context row each; an out-of-range slot writes nothing."""
        ...

    def block_hidden(
        self,
        config: Any,
        weights: Any,
        embed: Array,
        context: Any,
        anchor: Int[Array, "S"],
        start: Int[Array, "S"],
    ) -> Float[Array, "S G D"]:
        """Final-normed hidden states of the block [anchor, mask, ...] at positions start...

        Context rows 0..start-1 of each slot are visible, and the whole block in both directions.
        """
        ...

    def base_logits(
        self, config: Any, weights: Any, head: Array, hidden: Float[Array, "S C D"]
    ) -> Float[Array, "S C Vd"]:
        """fp32 logits of the parallel backbone."""
        ...

    def start_walk(self, config: Any, weights: Any, slots: int) -> Any:
        """State of the sequential head before the first position of a block."""
        ...

    def walk(
        self,
        config: Any,
        weights: Any,
        state: Any,
        hidden: Float[Array, "S D"],
        previous: Int[Array, "S"],
    ) -> tuple[Float[Array, "S Vd"] | None, Any]:
        """One position: fp32 logit bias (None = no head), and the next state."""
        ...

    def confidences(
        self,
        config: Any,
        weights: Any,
        hidden: Float[Array, "S C D"],
        previous: Int[Array, "S C"],
    ) -> Float[Array, "S C"] | None:
        """fp32 confidence logits of the walked positions; None = no head.

        A confidence sees the hidden state and the *previous* token, never the drafted one.
        """
        ...

    def walks_without_logits(self, weights: Any, head: Array, slots: int) -> bool:
        """Whether greedy requests are walked by ``best_position``. A family may have neither."""
        ...

    def best_position(
        self,
        config: Any,
        weights: Any,
        head: Array,
        state: Any,
        hidden: Float[Array, "S D"],
        previous: Int[Array, "S"],
    ) -> tuple[Int[Array, "S"], Any]:
        """`walk` of greedy requests: the best column of base logits plus bias, neither written."""
        ...

    def to_target_ids(self, weights: Any, draft_ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Draft-vocabulary columns to target token ids."""
        ...
