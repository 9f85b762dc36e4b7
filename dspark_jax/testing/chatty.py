"""A toy pair that chats in words, and whose right confidences are known: whole jobs in seconds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)
from dspark_jax.text.chat_template import ChatTemplate
from dspark_jax.text.text import Text

TEMPLATE = "{% for m in messages %}{{ 'user ' + m['content'] + ' end ' }}{% endfor %}{{ 'model' }}"
WORDS = ("user", "end", "model", *(f"w{i}" for i in range(29)))
STOP = WORDS.index("end")


class ChattyTargetConfig(MarkovTargetConfig):
    """A table target with a context."""

    max_position_embeddings = 512


def chatty_pair(
    temperatures: Float[np.ndarray, "G"], *, seed: int = 0
) -> tuple[LoadedTarget, LoadedDrafter]:
    """A target and a drafter over 32 words, overconfident by a known amount at temperature 1.

    After token a the drafter knows a random part of the vocabulary and drafts what the target
    would say there, so every draft after a is accepted with the same probability: the share of
    the target that lies in that part. The confidence logit of position j is ``temperatures[j]``
    times the logit of it, so those temperatures calibrate the conditional and, as acceptance
    does not depend on what was drafted, the cumulative event too, exactly.
    """
    random = np.random.default_rng(seed)
    size, block_size = len(WORDS), len(temperatures)
    target = 1.5 * random.normal(size=(size, size))
    target[:, STOP] -= 2.0
    known = random.uniform(size=(size, size)) < random.uniform(0.3, 0.95, (size, 1))
    known[np.arange(size), random.integers(0, size, size)] = True
    drafter = np.where(known, target, -40.0)
    accepted = np.where(known, jax.nn.softmax(target), 0.0).sum(axis=-1)
    right = np.log(accepted / np.maximum(1 - accepted, 1e-3))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "user"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = Text(tokenizer, ChatTemplate(TEMPLATE, {}, "chatty"))
    # The loaded pair is annotated with the model families that checkpoints hold.
    target_config: Any = ChattyTargetConfig(size)
    target_weights: Any = MarkovTargetWeights(jnp.asarray(target, jnp.float32))
    drafter_config: Any = MarkovDrafterConfig(size, block_size)
    confidence = jnp.asarray(np.asarray(temperatures)[:, None] * right, jnp.float32)
    drafter_weights: Any = MarkovDrafterWeights(jnp.asarray(drafter, jnp.float32), confidence)
    return (
        LoadedTarget(target_config, target_weights, text, (STOP,), "chatty"),
        LoadedDrafter(drafter_config, drafter_weights, "chatty-drafter"),
    )
