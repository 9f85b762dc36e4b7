"""Static description of the DSpark drafter that a DeepSeek-V4 checkpoint brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dspark_jax.drafter.validate import DrafterMismatch
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config


@dataclasses.dataclass(frozen=True)
class DeepseekV4DrafterConfig:
    """Shapes and constants; hashable.

    Attributes:
        target: the decoder whose layers the stages copy (window attention, scored routing), and
            whose embedding and head they use. One stage a tap.
        target_layer_ids: tapped layers; the last one is allowed, as taps are stream means.
        mask_token_id: fills the block behind its anchor (``dspark_noise_token_id``).
    """

    target: DeepseekV4Config
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int

    enable_confidence_head = True

    @property
    def stages(self) -> int:
        """Layers of the drafter."""
        return len(self.target_layer_ids)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of one tap."""
        return self.target.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    @property
    def family(self) -> ModuleType:
        """The module that implements the drafter protocol (``drafter/protocol.py``)."""
        from dspark_jax.drafter.deepseek_v4 import dspark

        return dspark


STORED = {
    "block_size": "dspark_block_size",
    "mask_token_id": "dspark_noise_token_id",
    "markov_rank": "dspark_markov_rank",
    "target_layer_ids": "dspark_target_layer_ids",
}
"""What a checkpoint calls its fields."""


def check_fits_v4(
    config: DeepseekV4DrafterConfig,
    target: Any,
    stop_token_ids: tuple[int, ...] = (),
    *,
    named: Mapping[str, str] = STORED,
) -> None:
    """Raise ``DrafterMismatch`` unless the drafter is sound and can draft for ``target``.

    Args:
        config: the drafter.
        target: a target config with ``num_hidden_layers``, ``hidden_size``, ``vocab_size``.
        stop_token_ids: ids that end an answer; the mask token must not be one.
        named: what messages call the fields.
    """
    faults = []
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        own, other = getattr(config.target, name), getattr(target, name)
        if own != other:
            faults.append(f"the drafter was made for {name} {own}, the target has {other}")
    if config.block_size < 1:
        faults.append(f"{named['block_size']} is {config.block_size}; it must be at least 1")
    if config.markov_rank < 1:
        faults.append(f"{named['markov_rank']} is {config.markov_rank}; it must be at least 1")
    last = config.target.num_hidden_layers - 1
    ids = config.target_layer_ids
    if not ids or len(set(ids)) < len(ids) or not all(-1 <= layer <= last for layer in ids):
        faults.append(
            f"{named['target_layer_ids']} is {list(ids)}; wanted distinct layers between -1 and "
            f"{last}"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        faults.append(
            f"{named['mask_token_id']} is {config.mask_token_id}; the embedding has rows 0 to "
            f"{config.vocab_size - 1}"
        )
    if config.mask_token_id in stop_token_ids:
        faults.append(
            f"{named['mask_token_id']} is {config.mask_token_id}, which also ends an answer; it "
            "must be a reserved id that no text produces"
        )
    if faults:
        raise DrafterMismatch("; ".join(faults))
