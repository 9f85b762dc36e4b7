"""The whole loop with a DeepSeek-V3.2 target: drafting never changes a greedy answer."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import ConfidenceHead, DrafterLayer, DrafterWeights, MarkovHead
from dspark_jax.schedule.cost import no_costs

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v32_tiny"
BATCH, ANSWER, DEPTH = 3, 30, 3
RANDOM = np.random.default_rng(0)
# one token: there is nothing to prefill, which would be a program more to compile
PROMPTS = RANDOM.integers(0, 160, (BATCH, 1)).astype(np.int32)
LENGTHS = np.ones(BATCH, np.int32)


@functools.cache
def pair():
    """One layer with experts, and a drafter that knows what follows a token most of the time."""
    target = load_target(GOLDEN, "float32")
    config = dataclasses.replace(target.config, num_hidden_layers=1, first_k_dense_replace=0)
    weights = target.weights.replace(
        embed=16 * target.weights.embed, layers=target.weights.layers[1:2]
    )
    width, inner, head = config.hidden_size, 40, 16
    drafter = DrafterConfig(
        block_size=DEPTH,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        target_layer_ids=(-1,),
        target_hidden_size=width,
        num_target_layers=1,
        mask_token_id=159,
        markov_rank=width,
    )

    def matrix(*shape, scale=1.0):
        values = scale * RANDOM.normal(size=shape) * shape[-1] ** -0.5
        return jax.device_put(values.astype(np.float32))

    layer = DrafterLayer(
        input_norm=jnp.ones(width),
        q=matrix(2 * head, width),
        kv=matrix(2 * head, width),
        out=matrix(width, 2 * head),
        q_norm=jnp.ones(head),
        k_norm=jnp.ones(head),
        post_norm=jnp.ones(width),
        gate_up=matrix(2 * inner, width),
        down=matrix(width, inner),
    )
    embed = weights.embed
    draft_weights = DrafterWeights(
        fc=matrix(width, width),
        hidden_norm=jnp.ones(width),
        layers=(layer,),
        norm=jnp.full(width, 0.1),
        markov=MarkovHead(w1=embed / jnp.std(embed, axis=-1, keepdims=True), w2=weights.head),
        confidence=ConfidenceHead(weight=matrix(2 * width, scale=20.0), bias=jnp.asarray(1.0)),
    )
    return config, drafter, Weights(weights, draft_weights)


def decode(mode, **options):
    target, drafter, weights = pair()
    config = StepConfig(target, drafter, mode, sampled=False, filtered=False, **options)
    costs = no_costs(BATCH, config.depth)
    price = 1.0 + 0.1 * jnp.arange(costs.verify.shape[1], dtype=jnp.float32)
    return loop.generate(
        weights,
        PROMPTS,
        LENGTHS,
        make_requests(BATCH, max_new_tokens=ANSWER, context=1 + ANSWER),
        costs.replace(verify=price[None], draft=costs.draft + 0.05, known=jnp.asarray(True)),
        config=config,
        max_tokens=ANSWER,
    )


def test_trimmed_verification_gives_the_tokens_of_plain_decoding():
    """The texts grow past the rows that a token attends to, and windows cross that length."""
    plain = decode("off")
    found = decode("compact", buckets=(BATCH * (DEPTH + 1),))
    assert (found.count == ANSWER).all()
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    windows, accepted = np.asarray(found.windows), np.asarray(found.accepted)
    steps = np.arange(ANSWER) < np.asarray(found.steps)[:, None]
    assert accepted[steps].sum() > ANSWER / 2, "nothing was drafted well: the test shows nothing"
    assert (accepted < windows)[steps].any(), "nothing was rejected"
    assert (windows < DEPTH)[steps].any(), "nothing was trimmed"
