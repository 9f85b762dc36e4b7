"""A small pair that sums its text, and a small engine's config."""

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.engine.config import EngineConfig
from dspark_jax.testing.summing import (
    SummingDrafterConfig,
    SummingTargetConfig,
    summing_weights,
)

VOCAB, BLOCK, STOP = 40, 2, 7
WEIGHTS = summing_weights(VOCAB, wrong=0.3)
TARGET = LoadedTarget(SummingTargetConfig(VOCAB), WEIGHTS[0], None, (STOP,), "summing")  # pyright: ignore
DRAFTER = LoadedDrafter(SummingDrafterConfig(VOCAB, BLOCK), WEIGHTS[1], "summing-drafter")  # pyright: ignore
SMALL = EngineConfig(
    max_requests=4,
    max_context=60,
    mode="compact",
    page_size=4,
    pages=24,
    prompt_width=5,
    max_batched_tokens=4 * (BLOCK + 1) + 5,
    batch_tiers=(4,),
    token_tiers=(),
    lag=2,
    steps=3,
    correct_costs=False,  # or windows depend on how busy the machine is
)
