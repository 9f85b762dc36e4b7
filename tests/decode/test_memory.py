"""A session holds no more after many requests than after a few."""

import gc

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.testing import markov

VOCAB = 16


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_live_device_memory_is_flat_over_requests_aborts_and_plain_decoding():
    table = 3.0 * jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
    target = LoadedTarget(
        markov.MarkovTargetConfig(VOCAB), markov.MarkovTargetWeights(table), None, (0,), "toy"
    )
    drafter = LoadedDrafter(
        markov.MarkovDrafterConfig(VOCAB, 3),
        markov.MarkovDrafterWeights(table, jnp.ones((3, VOCAB))),
        "toy-drafter",
    )
    sessions = [
        Generator(target, pair, batch=4, max_context=32, chunk_steps=4) for pair in (drafter, None)
    ]
    random = np.random.default_rng(0)

    def serve(count):
        requests = [
            Request(
                random.integers(1, VOCAB, random.integers(1, 9)).tolist(),
                SamplingParams(max_new_tokens=int(random.integers(1, 20))),
            )
            for _ in range(count)
        ]
        for session in sessions:
            session.generate(requests)

    def abort():
        def give_up(index, completion):
            raise KeyboardInterrupt

        request = Request([1], SamplingParams(max_new_tokens=3))
        for session in sessions:
            session.generate([request] * 9, on_completion=give_up)

    serve(4)
    abort()
    before = live_bytes()
    for _ in range(5):
        serve(20)
        abort()
    assert live_bytes() == before
