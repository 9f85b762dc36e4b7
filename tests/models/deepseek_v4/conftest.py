"""A small DeepSeek-V4 (a CSA and an HCA layer), and its logits one token at a time."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.checkpoints.deepseek_v4 import deepseek_v4_weights, target_shapes
from dspark_jax.checkpoints.quantized import STORED_DTYPES
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.models.deepseek_v4 import cache as cache_module
from dspark_jax.models.deepseek_v4 import model
from dspark_jax.models.deepseek_v4.cache import DeepseekV4Cache
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.ring import SCRATCH
from dspark_jax.models.deepseek_v4.weights import DeepseekV4Weights
from dspark_jax.models.ragged import Packed, compact, rectangle
from dspark_jax.testing.deepseek_v4 import random_tensors, toy_config

CAPACITY = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
    """The model, and its functions compiled."""

    config: DeepseekV4Config
    weights: DeepseekV4Weights

    def cache(self, slots: int, capacity: int = CAPACITY) -> DeepseekV4Cache:
        return _init_cache(self.config, slots, capacity, self.weights.embed.dtype)

    def run(self, cache: DeepseekV4Cache, packed: Packed) -> tuple[jax.Array, DeepseekV4Cache]:
        """Logits of packed rows, and the cache."""
        logits, _, cache = self.forward(cache, packed)
        return logits, cache

    def forward(self, cache: DeepseekV4Cache, packed: Packed) -> tuple[jax.Array, jax.Array, Any]:
        """Logits of packed rows, taps (1, -1, 0), and the cache."""
        return _forward(self.config, self.weights, cache, packed)

    def commit(self, cache: DeepseekV4Cache, length: np.ndarray) -> DeepseekV4Cache:
        """The cache with so many rows of each slot committed."""
        return _commit(self.config, cache, length)

    def rectangle(self, *arrays: np.ndarray) -> Packed:
        """Rows of tokens from ``start``, ``count`` of them, in these slots."""
        return _rectangle(*(np.asarray(values, np.int32) for values in arrays))

    def prefill(
        self, tokens: np.ndarray, cache: DeepseekV4Cache, start: int = 0
    ) -> tuple[np.ndarray, DeepseekV4Cache]:
        """Logits ``[S, W, V]`` of whole rows of tokens from ``start``, committed."""
        count = np.full(tokens.shape[0], tokens.shape[1], np.int32)
        begin = np.full_like(count, start)
        logits, cache = self.run(cache, self.rectangle(tokens, begin, count, np.arange(len(count))))
        cache = self.commit(cache, begin + count)
        return np.asarray(logits).reshape(*tokens.shape, -1), cache

    def verify(
        self, cache: DeepseekV4Cache, tokens: np.ndarray, start: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, DeepseekV4Cache]:
        """Logits ``[S, W, V]`` of ragged windows packed one after another; nothing committed."""
        slots, width = tokens.shape
        # windows of every width are one program
        wide = np.pad(tokens, ((0, 0), (0, SCRATCH - width)))
        packed = _compact(wide, start, count, slots * SCRATCH)
        logits, cache = self.run(cache, packed)
        return np.asarray(_unpack(packed, logits))[:, :width], cache

    def serial(self, tokens: np.ndarray) -> np.ndarray:
        """Logits ``[S, L, V]`` of decoding one token at a time."""
        return np.asarray(_serial(self.config, self.weights, jnp.asarray(tokens)))


# Every operation outside of a jitted function is a program to compile for each of its shapes.
_commit = jax.jit(model.commit, static_argnums=0)
_init_cache = jax.jit(model.init_cache, static_argnums=(0, 1, 2, 3))
_rectangle = jax.jit(rectangle)
_compact = jax.jit(compact, static_argnums=3)
_unpack = jax.jit(Packed.unpack)


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, weights, cache, packed):
    hidden, taps, cache = model.forward(config, weights, cache, packed, taps=(1, -1, 0))
    return model.unembed(config, weights, hidden), taps, cache


@functools.partial(jax.jit, static_argnums=0)
def _serial(config, weights, tokens):
    slots = tokens.shape[0]
    cache = model.init_cache(config, slots, CAPACITY, weights.embed.dtype)

    def step(cache, token):
        one = jnp.ones(slots, jnp.int32)
        hidden, _, cache = model.forward(
            config, weights, cache, rectangle(token[:, None], cache.length, one)
        )
        cache = model.commit(config, cache, cache.length + 1)
        return cache, model.unembed(config, weights, hidden)

    return jnp.swapaxes(jax.lax.scan(step, cache, tokens.T)[1], 0, 1)


def load_toy(folder: Path, dtype: str = "float32", **changes) -> Toy:
    config = toy_config(**changes)
    tensors = random_tensors(target_shapes(config), experts=config.n_routed_experts)
    save_file(tensors, folder / "model.safetensors")
    source = SafetensorsSource(folder, STORED_DTYPES)
    return Toy(config, deepseek_v4_weights(config, source, dtype, folder))


@pytest.fixture(scope="module", autouse=True)
def small_pages():
    """Pages of 16 tokens, so that a short text has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "PAGE_TOKENS", 16)
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return load_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def half_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The same weights in bfloat16."""
    return load_toy(tmp_path_factory.mktemp("half"), "bfloat16")


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    """Two texts of 48 tokens."""
    return np.random.default_rng(3).integers(0, 64, (2, 48)).astype(np.int32)


@pytest.fixture(scope="module")
def wanted(toy: Toy, texts: np.ndarray) -> np.ndarray:
    """What decoding one token at a time says after every token of the texts."""
    return toy.serial(texts)
