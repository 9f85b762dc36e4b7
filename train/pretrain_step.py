"""One pretraining step of a sparse target: next tokens, indexers, and the load of its experts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from train.features import SPARSE_FAMILIES
from train.losses import Ratio, Terms
from train.mesh import gathered, rules_of, training_mesh, weight_shardings
from train.optimizer import clipped_optimizer, learning_rate_schedule
from train.pretrain_config import PretrainConfig, TeacherSection
from train.sequence_experts import balanced_bias, load_figures
from train.sequence_output import LayerReport
from train.step import StepReport

POSITIONS = 64
"""Tokens of every sequence that have logits at one time."""


@flax.struct.dataclass
class PretrainState:
    """Everything a step changes. ``weights`` are fp32 masters; tables of integers are None."""

    weights: Any
    optimizer: optax.OptState
    step: Int[Array, ""]


def compiled_part(config: PretrainConfig) -> PretrainConfig:
    """The run without what no program depends on: names, folders and intervals."""
    return dataclasses.replace(
        config,
        teacher=TeacherSection(""),
        data=dataclasses.replace(config.data, folders=("",)),
        training=dataclasses.replace(config.training, output="", seed=0, log_every=1, save_every=1),
    )


def split_tables(weights: PyTree) -> tuple[PyTree, PyTree]:
    """What learns and what does not: floating-point arrays, and the others; None fills the rest."""

    def keep(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) == floating else None,
            weights,
        )

    return keep(True), keep(False)


def served_weights(learnt: PyTree, tables: PyTree, dtypes: tuple[str, ...]) -> Any:
    """The weights a forward takes: masters in the ``dtypes`` of serving, and the tables."""
    leaves, structure = jax.tree.flatten(learnt)
    cast = [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.map(
        lambda own, table: table if own is None else own,
        jax.tree.unflatten(structure, cast),
        tables,
        is_leaf=lambda leaf: leaf is None,
    )


def optimizer_of(config: PretrainConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The run's optimizer and its learning-rate schedule."""
    schedule = learning_rate_schedule(config.training.learning_rate, config.training.steps)
    return clipped_optimizer(schedule, config.training.optimizer), schedule


def initial_state(config: PretrainConfig, learnt: PyTree) -> PretrainState:
    """The state before the first step, on the run's mesh."""
    leaves, structure = jax.tree.flatten(learnt)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _start(compiled_part(config), structure, shapes)(learnt)


# kept, as a run that resumes begins like one that does not
@functools.lru_cache(maxsize=4)
def _start(config: PretrainConfig, structure: Any, shapes: tuple) -> Any:
    """A jitted function from weights of these shapes to the state before any step."""

    def make(learnt: Any) -> PretrainState:
        masters: Any = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), learnt)
        return PretrainState(masters, optimizer_of(config)[0].init(masters), jnp.int32(0))

    state = jax.eval_shape(make, jax.tree.unflatten(structure, shapes))
    return jax.jit(make, out_shardings=state_shardings(config, state))


def state_shardings(config: PretrainConfig, state: Any) -> Any:
    """Where every array of a state lives; moments lie beside their weights."""
    mesh, rules = training_mesh(config.mesh), rules_of(config.mesh)
    return weight_shardings(mesh, rules, state, config.model.vocab_size)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def pretrain_step(
    config: PretrainConfig,
    dtypes: tuple[str, ...],
    state: PretrainState,
    tables: PyTree,
    tokens: Int[Array, "B K"],
    loss_mask: Bool[Array, "B K"],
) -> tuple[PretrainState, StepReport]:
    """Advance by one batch of documents; every token of a document is learnt, prompts too.

    Args:
        config: the ``compiled_part`` of a run.
        dtypes: that the leaves of ``state.weights`` are computed in.
        state: where the run stands.
        tables: the integers among the weights (``split_tables``).
        tokens: documents, padded at the end.
        loss_mask: a document ends with its last True.
    """
    optimizer, schedule = optimizer_of(config)
    mesh, model = training_mesh(config.mesh), config.model
    real = jnp.flip(jnp.cumsum(jnp.flip(loss_mask, axis=1), axis=1), axis=1) > 0

    def objective(learnt: Any) -> tuple[Array, tuple[Terms, tuple[LayerReport, ...]]]:
        learnt = gathered(mesh, learnt, model.vocab_size)
        weights = served_weights(learnt, tables, dtypes)
        output = SPARSE_FAMILIES[type(model)].sequence_forward(model, weights, tokens, real, ())
        figures = next_token_loss(output.last_hidden, learnt.head, tokens, real)
        losses = [one.indexer_loss for one in output.reports if one.indexer_loss is not None]
        indexers = sum(losses, jnp.zeros(()))
        if losses:
            figures["indexer_loss"] = Ratio(indexers, jnp.float32(len(losses)))
        loads = [one.expert_load for one in output.reports if one.expert_load is not None]
        figures |= load_figures(loads)
        loss = figures["cross_entropy"].value()
        # no parameter is part of both terms
        return loss + indexers, (Terms(loss=loss, metrics=figures), output.reports)

    gradient, (terms, reports) = jax.grad(objective, has_aux=True)(state.weights)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
    updated: Any = optax.apply_updates(state.weights, updates)
    report = StepReport(
        terms=terms,
        learning_rate=jnp.asarray(schedule(state.step)),
        gradient_norm=optax.tree.norm(gradient),
    )
    new = PretrainState(balanced(updated, reports), optimizer_state, state.step + 1)
    return jax.lax.with_sharding_constraint(new, state_shardings(config, new)), report


def next_token_loss(
    hidden: Float[Array, "B K D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B K"],
    real: Bool[Array, "B K"],
) -> dict[str, Ratio]:
    """Cross entropy in nats, and accuracy, of every next token that is ``real``.

    Logits of 64 positions exist at one time, and again for their gradients.
    """
    batch, length = tokens.shape
    size = math.gcd(length, POSITIONS)
    labels = jnp.roll(tokens, -1, axis=1)
    counted = jnp.roll(real, -1, axis=1).at[:, -1].set(False)

    def parts(values: Array) -> Array:
        return jnp.moveaxis(values.reshape(batch, length // size, size, *values.shape[2:]), 1, 0)

    @jax.checkpoint
    def add(
        sums: tuple[Array, Array], part: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        hidden, labels, counted = part
        logits = jnp.einsum(
            "bkd,vd->bkv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - chosen
        right = jnp.argmax(logits, axis=-1) == labels
        return (sums[0] + (loss * counted).sum(), sums[1] + (right & counted).sum()), None

    start = (jnp.zeros(()), jnp.zeros((), jnp.int32))
    (loss, right), _ = jax.lax.scan(add, start, tuple(map(parts, (hidden, labels, counted))))
    count = counted.sum().astype(jnp.float32)
    return {
        "cross_entropy": Ratio(loss, count),
        "accuracy": Ratio(right.astype(jnp.float32), count),
    }


def balanced(weights: Any, reports: tuple[LayerReport, ...]) -> Any:
    """Router biases moved against the load."""

    def steer(layer: Any, load: Float[Array, "X"] | None) -> Any:
        if load is None:
            return layer
        name = "moe" if hasattr(layer, "moe") else "ffn"
        experts = getattr(layer, name)
        bias = balanced_bias(experts.bias, load)
        return layer.replace(**{name: experts.replace(bias=bias)})

    layers = zip(weights.layers, reports, strict=True)
    return weights.replace(layers=tuple(steer(layer, one.expert_load) for layer, one in layers))
