"""What training asks of a drafter: a module of pure functions, chosen by the kind of its config.

Decoding asks the drafter's ``family`` for one block a request over caches; training asks for many
blocks a sequence, over features that are all there, with gradients.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from train import drafter_deepseek_v4, drafter_dspark
from train.config import DeepseekV4DrafterSection, DrafterSection, TrainConfig
from train.draft_heads import DraftHeads

FAMILIES: dict[type, ModuleType] = {
    DrafterConfig: drafter_dspark,
    DeepseekV4DrafterConfig: drafter_deepseek_v4,
}
SECTIONS: dict[type, ModuleType] = {
    DrafterSection: drafter_dspark,
    DeepseekV4DrafterSection: drafter_deepseek_v4,
}


class TrainedFamily(Protocol):
    """Functions of a family. ``SMALL_HEADS`` names the weights that are trained in fp32."""

    SMALL_HEADS: tuple[str, ...]

    def drafter_config(self, section: Any, loaded: LoadedTarget) -> Any:
        """The drafter that a section of a run describes for a target.

        Raises:
            DrafterMismatch: a section that does not fit the target.
        """
        ...

    def initial_weights(self, config: Any, key: Key[Array, ""]) -> Any:
        """fp32 weights before the first step."""
        ...

    def served(self, weights: Any, dtype: Any) -> Any:
        """The weights in the dtypes that serving takes them in, ``dtype`` for most of them."""
        ...

    def block_hidden(
        self,
        config: Any,
        weights: Any,
        embed: Float[Array, "V D"],
        taps: Float[Array, "B K nDt"],
        tokens: Int[Array, "B A G"],
        anchors: Int[Array, "B A"],
        keep: Bool[Array, "B A"],
    ) -> tuple[Float[Array, "B A G D"], tuple[Float[Array, "X"], ...]]:
        """Hidden states of the blocks ``tokens`` at ``anchors``, as decoding would have them.

        A block sees context rows of positions before its anchor. Blocks that are not to be
        kept do not count in the second result: the load of the experts of each layer that has
        some.
        """
        ...

    def heads(
        self,
        config: Any,
        weights: Any,
        head: Float[Array, "V D"],
        hidden: Float[Array, "... G D"],
        previous: Int[Array, "... G"],
        *,
        detach: bool = False,
    ) -> DraftHeads:
        """What the heads make of hidden states; ``previous`` holds the true token before each.

        With ``detach`` no gradient of the confidence reaches what its head reads.

        Raises:
            ValueError: a pruned draft vocabulary, whose columns the target's logits do not share.
        """
        ...

    def balanced(self, weights: Any, loads: tuple[Float[Array, "X"], ...]) -> Any:
        """The weights with the biases of routers moved against the load of their experts."""
        ...


def family_of(config: Any) -> TrainedFamily:
    """The module that trains drafters with such a config."""
    family: Any = FAMILIES[type(config)]
    return family


def described_drafter(config: TrainConfig, loaded: LoadedTarget) -> Any:
    """The config of the drafter that a run describes for a target.

    Raises:
        DrafterMismatch: it does not fit the target.
    """
    section = config.described
    return SECTIONS[type(section)].drafter_config(section, loaded)


def training_weights(config: Any, weights: Any, dtype: Any) -> Any:
    """fp32 masters as a step computes with them: the small heads stay fp32.

    So their gradients add in fp32.
    """
    family = family_of(config)
    kept = {name: getattr(weights, name) for name in family.SMALL_HEADS}
    return family.served(weights, dtype).replace(**kept)
