"""Milliseconds of one training step, by part, beside the least each part can take.

The step is the one ``dspark train`` runs, on the shapes of a published drafter: forward, loss,
backward, clip and AdamW with the target's features given. Weights, features and tokens are
random, so the figures are about speed alone; every slot is supervised, so nothing is skipped.

The parts are programs of their own, compiled side by side. "vocabulary loss" is both heads'
products, the losses and their gradients; "backward" is what the gradient of the whole takes beyond
the draft forward and that; "optimizer" is what the step takes beyond the gradient. "target
forward" is not in the step.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.record import Record
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.compiling import CUBLAS
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.weights import DenseLayer, DenseWeights
from train.anchors import sample_anchors
from train.config import DataSection, DrafterSection, TargetSection, TrainConfig, TrainingSection
from train.drafters import training_weights
from train.features import target_features
from train.forward import (
    Sequences,
    block_rows,
    draft_blocks,
    drafter_terms,
    supervised_first,
)
from train.initialize import drafter_config
from train.step import initial_state, train_step

COPY_BYTES_PER_SECOND = 4.3e12
PRODUCT_FLOPS_PER_SECOND = 790e12
"""Ceilings measured on an H200: a device copy and a bf16 matrix product."""
CHAINS, TIMED = 5, 10


@dataclasses.dataclass(frozen=True)
class Shape:
    """A drafter, its target, and what one step of it sees."""

    target: DenseConfig
    drafter: DrafterSection
    sequence_length: int
    anchor_chunk: int
    reference_ms: float
    reference_gigabytes: float


SHAPES = {
    "smollm2-135m": Shape(
        target=DenseConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 100000.0, 1e-5, True, 8192),
        drafter=DrafterSection(3, 7, (1, 8, 15, 22, 28), 3, 64),
        sequence_length=1024,
        anchor_chunk=512,
        reference_ms=19.4,
        reference_gigabytes=5.4,
    ),
    "qwen3-4b": Shape(
        target=DenseConfig(
            "qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1e6, 1e-6, True, 40960, qk_norm=True
        ),
        drafter=DrafterSection(5, 7, (1, 9, 17, 25, 33), 151669, 256),
        sequence_length=2048,
        anchor_chunk=512,
        reference_ms=79.2,
        reference_gigabytes=22.5,
    ),
}
"""``reference_*`` are DeepSpec's compiled step on an H200 (torch 2.11, flex attention)."""


def main(
    shape: str,
    *,
    num_anchors: int = 512,
    batch_size: int = 1,
    anchor_chunk: int | None = None,
    target_forward: bool = True,
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Time a training step.

    Args:
        shape: smollm2-135m or qwen3-4b.
        num_anchors: blocks a sequence.
        batch_size: sequences a step.
        anchor_chunk: blocks a sequence whose logits exist at one time; default by shape.
        target_forward: also time the target's forward, with all its layers.
        output: JSON of everything measured.
    """
    if shape not in SHAPES:
        print(f"shape is {shape!r}; wanted one of {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    chosen = SHAPES[shape]
    record = Record(output, shape=shape, weights="random", data="random")
    with record.arm(shape=shape, num_anchors=num_anchors, batch_size=batch_size) as arm:
        run = Run(chosen, num_anchors, batch_size, anchor_chunk or chosen.anchor_chunk)
        arm["anchor_chunk"] = run.config.training.anchor_chunk
        begin = time.perf_counter()
        compiled = compile_all(run.programs(target_forward))
        arm["compile_seconds"] = round(time.perf_counter() - begin, 1)
        arm["step_ms"] = run.step_ms(compiled["step"])
        stats = jax.devices()[0].memory_stats() or {}
        arm["peak_gigabytes"] = stats.get("peak_bytes_in_use", 0) / 1e9
        arm["reference_step_ms"] = chosen.reference_ms
        arm["reference_peak_gigabytes"] = chosen.reference_gigabytes
        arm["parts_ms"] = run.parts_ms(arm["step_ms"], compiled)
        arm["floor_ms"] = floors_ms(chosen, run.drafter, num_anchors, batch_size)
        Console().print(table(arm))
    return record.finish()


class Run:
    """Random weights and data of one shape, and its timed programs."""

    def __init__(self, shape: Shape, anchors: int, batch: int, anchor_chunk: int) -> None:
        self.target = shape.target
        width, lead = shape.target.hidden_size, (batch, shape.sequence_length)
        taps = len(shape.drafter.target_layer_ids) * width
        keys = jax.random.split(jax.random.key(0), 4)
        norm = jnp.ones(width, jnp.bfloat16)
        embed = _normal(keys[0], (shape.target.vocab_size, width))
        self.frozen = DenseWeights(embed, (), norm, None)
        self.tokens = jax.random.randint(keys[1], lead, 0, shape.target.vocab_size)
        self.mask = jnp.ones(lead, bool)
        self.cached = (_normal(keys[2], (*lead, taps), 1.0), _normal(keys[3], (*lead, width), 1.0))
        loaded = LoadedTarget(shape.target, self.frozen, None, (), "random weights")
        self.drafter = drafter_config(shape.drafter, loaded)
        self.config = TrainConfig(
            target=TargetSection(name=""),
            data=DataSection(sequence_length=shape.sequence_length, folders=("",)),
            drafter=shape.drafter,
            training=TrainingSection(
                output="",
                steps=1000,
                batch_size=batch,
                num_anchors=anchors,
                anchor_chunk=anchor_chunk,
            ),
        )

    def programs(self, target_forward: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Every timed program, jitted, and what to lower it with."""
        training, embed, drafter = self.config.training, self.frozen.embed, self.drafter
        anchors, keep = sample_anchors(jax.random.key(1), self.mask, training.num_anchors)
        chunk = len(self.tokens) * training.anchor_chunk

        def forward(weights: Any, batch: Sequences) -> Any:
            cast = training_weights(drafter, weights, jnp.bfloat16)
            blocks, _ = draft_blocks(drafter, cast, embed, batch, anchors, keep)
            return supervised_first(blocks, 1)

        def vocabulary(weights: Any, blocks: Any) -> Any:
            def objective(hidden: Any, markov: Any) -> Any:
                given, drafted = weights.replace(markov=markov), blocks.replace(hidden=hidden)
                rows = block_rows(drafter, given, embed, drafted, self.config.loss, chunk)
                assert rows.weighted is not None
                return rows.weighted

            return jax.grad(objective, (0, 1))(blocks.hidden, weights.markov)

        def gradient(weights: Any, batch: Sequences) -> Any:
            def objective(weights: Any) -> Any:
                cast = training_weights(drafter, weights, jnp.bfloat16)
                loss = self.config.loss
                return drafter_terms(
                    *(drafter, cast, embed, embed, batch, anchors, keep, loss),
                    training.anchor_chunk,
                ).loss

            return jax.grad(objective)(weights)

        state = jax.eval_shape(lambda: initial_state(self.config, drafter))
        batch = Sequences(self.tokens, self.mask, *self.cached)
        blocks = jax.eval_shape(forward, state.weights, batch)
        given = (self.frozen, self.tokens, self.mask, self.cached)
        part = functools.partial(jax.jit, compiler_options=CUBLAS)
        found: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "step": (train_step, (self.config, drafter, self.target, state, *given)),
            "draft forward": (part(forward), (state.weights, batch)),
            "vocabulary loss": (part(vocabulary), (state.weights, blocks)),
            "gradient": (part(gradient), (state.weights, batch)),
        }
        if target_forward:
            config, taps = self.target, drafter.target_layer_ids
            layers = jax.eval_shape(lambda: random_layers(config))
            features = part(lambda frozen, ids: target_features(config, frozen, ids, taps))
            whole = dataclasses.replace(self.frozen, layers=layers)
            found["target forward"] = (features, (whole, self.tokens))
        return found

    def step_ms(self, step: Callable[..., Any]) -> float:
        """The whole step, state donated from one to the next."""
        state = [initial_state(self.config, self.drafter)]

        def once() -> Any:
            state[0], report = step(state[0], self.frozen, self.tokens, self.mask, self.cached)
            return report

        return milliseconds(once)

    def parts_ms(self, step_ms: float, compiled: dict[str, Callable[..., Any]]) -> dict[str, float]:
        """The step's parts; they add up to it."""
        weights = initial_state(self.config, self.drafter).weights
        batch = Sequences(self.tokens, self.mask, *self.cached)
        blocks = compiled["draft forward"](weights, batch)
        draft = milliseconds(lambda: compiled["draft forward"](weights, batch))
        loss = milliseconds(lambda: compiled["vocabulary loss"](weights, blocks))
        whole = milliseconds(lambda: compiled["gradient"](weights, batch))
        parts = {
            "draft forward": draft,
            "vocabulary loss": loss,
            "backward": whole - draft - loss,
            "optimizer": step_ms - whole,
        }
        if "target forward" in compiled:
            target = dataclasses.replace(self.frozen, layers=random_layers(self.target))
            parts["target forward"] = milliseconds(
                lambda: compiled["target forward"](target, self.tokens)
            )
        return parts


def compile_all(programs: dict[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """Compile side by side."""

    def build(program: tuple[Any, tuple[Any, ...]]) -> Any:
        jitted, arguments = program
        return jitted.lower(*arguments).compile()

    with ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(build, programs.values()), strict=True))


def random_layers(config: DenseConfig) -> tuple[DenseLayer, ...]:
    """Random bf16 layers of a dense target."""
    width, head = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    one = jnp.ones(width, jnp.bfloat16)
    norm = jnp.ones(head, jnp.bfloat16) if config.qk_norm else None

    def layer(key: Any) -> DenseLayer:
        keys = jax.random.split(key, 4)
        return DenseLayer(
            input_norm=one,
            qkv=_normal(keys[0], ((heads + 2 * groups) * head, width)),
            out=_normal(keys[1], (width, heads * head)),
            post_norm=one,
            gate_up=_normal(keys[2], (2 * config.intermediate_size, width)),
            down=_normal(keys[3], (width, config.intermediate_size)),
            q_norm=norm,
            k_norm=norm,
        )

    keys = jax.random.split(jax.random.key(2), config.num_hidden_layers)
    return tuple(layer(key) for key in keys)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Any, shape: tuple[int, ...], deviation: float = 0.02) -> Any:
    return jax.random.normal(key, shape, jnp.bfloat16) * deviation


def milliseconds(program: Callable[[], Any]) -> float:
    """Of a call among ``TIMED`` launched in a row, as a trainer does; median of ``CHAINS`` rows."""
    times = []
    jax.block_until_ready(program())
    for _ in range(CHAINS):
        begin = time.perf_counter()
        for _ in range(TIMED - 1):
            program()
        jax.block_until_ready(program())
        times.append((time.perf_counter() - begin) / TIMED)
    return 1e3 * statistics.median(times)


def floors_ms(shape: Shape, drafter: DrafterConfig, anchors: int, batch: int) -> dict[str, float]:
    """The least each part can take: its products at the measured peak, or its bytes.

    A block is taken to see half its sequence; backward products are twice the forward's.
    """
    rows, tokens = batch * anchors * drafter.block_size, batch * shape.sequence_length
    width, layers = drafter.hidden_size, drafter.num_hidden_layers
    query = drafter.num_attention_heads * drafter.head_dim
    both = 2 * drafter.num_key_value_heads * drafter.head_dim
    mlp = 3 * width * drafter.intermediate_size
    taps = len(drafter.target_layer_ids) * drafter.target_hidden_size
    per_row = layers * (2 * query * width + both * width + mlp)
    per_token = taps * width + layers * both * width
    seen = shape.sequence_length / 2 + drafter.block_size
    draft = 2 * (rows * per_row + tokens * per_token) + layers * rows * seen * 4 * query
    vocabulary = 2 * rows * drafter.vocab_size * (3 * width + 3 * drafter.markov_rank)
    weights = layers * (2 * query * width + both * width + mlp) + taps * width
    weights += 2 * drafter.vocab_size * drafter.markov_rank
    target = shape.target
    target_row = target.num_hidden_layers * (
        target.hidden_size
        * (2 * target.num_attention_heads + 2 * target.num_key_value_heads)
        * target.head_dim
        + 3 * target.hidden_size * target.intermediate_size
    )
    attended = target.num_hidden_layers * shape.sequence_length / 2 * 4
    attended *= target.num_attention_heads * target.head_dim

    def products(flops: float) -> float:
        return 1e3 * flops / PRODUCT_FLOPS_PER_SECOND

    return {
        "draft forward": products(draft),
        "vocabulary loss": products(vocabulary),
        "backward": products(2 * draft),
        # gradient, weight and two moments are read, the last three written, the norm read first
        "optimizer": 1e3 * weights * 4 * 8 / COPY_BYTES_PER_SECOND,
        "target forward": products(tokens * (2 * target_row + attended)),
    }


def table(arm: dict[str, Any]) -> Table:
    """Parts beside their floors."""
    title = (
        f"{arm['shape']}: {arm['step_ms']:.2f} ms a step (reference "
        f"{arm['reference_step_ms']}), peak {arm['peak_gigabytes']:.1f} GB"
    )
    rows = Table("part", "ms", "floor", title=title)
    for name, value in arm["parts_ms"].items():
        rows.add_row(name, f"{value:.2f}", f"{arm['floor_ms'][name]:.2f}")
    return rows


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
