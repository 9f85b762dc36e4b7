"""GGUF files: configuration, dequantised tensors under Hugging Face names, and metadata."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dspark_jax.checkpoints.target import check_dense
from dspark_jax.models.config import DenseConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen3")
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """A reader that cuts fields from a plain view of the file.

    It makes a slice for every entry of a vocabulary, and slices of a memory map are slow to make.
    """

    @property
    def data(self) -> np.ndarray:
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._bytes = mapped.view(np.ndarray)


class GgufFile:
    """A GGUF file of a Llama or Qwen3 model.

    ``shapes`` and ``read`` follow ``tensors.TensorSource`` with Hugging Face names, so that the
    same strict loader serves both formats; a tensor without a counterpart keeps its own name.
    """

    def __init__(self, path: Path | str) -> None:
        """Open ``path`` (memory-mapped).

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not a GGUF file, or an architecture other than llama and qwen3.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no GGUF file at {self.path}")
        try:
            self._reader = _Reader(self.path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{self.path} is not a readable GGUF file: {error}") from error
        self.architecture = self.metadata("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: architecture {self.architecture!r} is not supported; supported: "
                + ", ".join(ARCHITECTURES)
            )
        self._tensors = {_hugging_face_name(t.name): t for t in self._reader.tensors}
        # GGUF lists the fastest axis first.
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
            if name != ROPE_FACTORS
        }

    def metadata(self, key: str) -> Any:
        """The value stored under ``key``, or None."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def read(self, name: str) -> np.ndarray:
        """The tensor under its Hugging Face name, dequantised to float32."""
        tensor = self._tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = np.asarray(values, np.float32).reshape(self.shapes[name])
        if self.architecture == "llama":
            if name.endswith("q_proj.weight"):
                return _split_halves(values, self._number("attention.head_count"))
            if name.endswith("k_proj.weight"):
                return _split_halves(values, self._key_value_heads())
        return values

    def config(self) -> DenseConfig:
        """The model's shapes and constants.

        Raises:
            ValueError: metadata that is missing, of the wrong kind or out of range, or asks for
                what is not supported (experts, scaled RoPE other than Llama 3's, partial
                rotation); value and key named.
        """
        experts = self._optional("expert_count")
        if experts:
            raise ValueError(f"{self.path}: expert_count is {experts}, wanted a dense model")
        scaling = self._optional("rope.scaling.type")
        if scaling not in (None, "none"):
            raise ValueError(f"{self.path}: rope.scaling.type is {scaling!r}, wanted 'none'")
        if "model.embed_tokens.weight" not in self.shapes:
            raise ValueError(f"{self.path} lacks token_embd.weight")
        hidden, heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", hidden // max(heads, 1))
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ValueError(
                f"{self.path}: rope.dimension_count is {rotated}, wanted the head width {head_dim}"
            )
        theta = self._real("rope.freq_base", 10_000.0)
        config = DenseConfig(
            model_type=self.architecture,
            vocab_size=self.shapes["model.embed_tokens.weight"][0],
            hidden_size=hidden,
            intermediate_size=self._number("feed_forward_length"),
            num_hidden_layers=self._number("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._key_value_heads(),
            head_dim=head_dim,
            rope_theta=theta,
            rms_norm_eps=_shortest(self._real("attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="lm_head.weight" not in self.shapes,
            max_position_embeddings=self._number("context_length"),
            qk_norm=self.architecture == "qwen3",
            rope_scaling=None,
        )
        check_dense(config, self.path)
        return dataclasses.replace(config, rope_scaling=self._rope_scaling(head_dim, theta))

    def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
        """Llama 3's scaling, which GGUF stores as one divisor a frequency.

        Every released Llama 3 uses 1, 4 and 8192 beside its factor; the divisors are checked
        against those constants.
        """
        if ROPE_FACTORS not in self._tensors:
            return None
        stored = np.asarray(self._tensors[ROPE_FACTORS].data, np.float64)
        scaling = RopeScaling(float(stored.max()), 1.0, 4.0, 8192)
        wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
        computed = 1 / ((1 - smooth) / scaling.factor + smooth)
        if stored.shape != computed.shape or not np.allclose(stored, computed, rtol=1e-3):
            raise ValueError(
                f"{self.path}: {ROPE_FACTORS} is not Llama 3's rescaling (low 1, high 4, "
                "original context 8192); load the Hugging Face folder instead"
            )
        return scaling

    def _key_value_heads(self) -> int:
        return self._number("attention.head_count_kv", self._number("attention.head_count"))

    def _optional(self, key: str) -> Any:
        return self.metadata(f"{self.architecture}.{key}")

    def _required(self, key: str, default: Any) -> Any:
        """The value under ``key``, or else ``default``; ValueError without either."""
        value = self._optional(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.path} lacks the metadata {self.architecture}.{key}")
        return value

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if type(value) is not int:
            raise ValueError(f"{self.path}: {key} is {value!r}, wanted one number for all layers")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if type(value) not in (int, float):
            raise ValueError(f"{self.path}: {key} is {value!r}, wanted a number")
        return float(value)


def _hugging_face_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, tensor = rest.partition(".")
    inner = LAYER_NAMES.get(tensor.removesuffix(".weight"))
    if block != "blk" or inner is None or not tensor.endswith(".weight"):
        return name
    return f"model.layers.{index}.{inner}.weight"


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs to two halves, the RoPE layout used here."""
    paired = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)


def _shortest(value: float) -> float:
    """A float32 metadata value as the decimal it was written as (1e-5, not 9.99999974e-06)."""
    return float(str(np.float32(value)))
