"""One training step: target features, anchors, loss, gradient and update as one program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.compiling import CUBLAS
from train.anchors import sample_anchors
from train.config import TrainConfig
from train.drafters import family_of, training_weights
from train.features import target_features
from train.forward import Sequences, drafter_terms
from train.losses import Terms
from train.mesh import DATA, gathered, rules_of, training_mesh, weight_shardings
from train.optimizer import clipped_optimizer, learning_rate_schedule
from train.start import hold_still, with_confidence


@flax.struct.dataclass
class TrainState:
    """Everything a step changes. ``weights`` are the fp32 masters, ``key`` raw PRNG key data."""

    weights: Any
    optimizer: optax.OptState
    step: Int[Array, ""]
    key: Array


@flax.struct.dataclass
class StepReport:
    """Device scalars of one step, read by the host later or never."""

    terms: Terms
    learning_rate: Array
    gradient_norm: Array


def optimizer_of(config: TrainConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The run's optimizer and its learning-rate schedule."""
    schedule = learning_rate_schedule(config.training.learning_rate, config.training.steps)
    return clipped_optimizer(schedule, config.training.optimizer), schedule


def compiled_part(config: TrainConfig) -> TrainConfig:
    """The run without what no program depends on: names, folders and intervals.

    Runs that differ in nothing else share their programs.
    """
    training = dataclasses.replace(
        config.training, output="", start_from=None, log_every=1, save_every=1
    )
    if training.trainable == "confidence_head":
        training = dataclasses.replace(training, start_from="given")
    data = dataclasses.replace(config.data, folders=("",), cache=None)
    target = dataclasses.replace(config.target, name="")
    return dataclasses.replace(config, training=training, data=data, target=target)


def initial_state(config: TrainConfig, drafter: Any, existing: Any = None) -> TrainState:
    """The state before the first step, fixed by ``config.training.seed``, on the run's mesh.

    It begins with the weights ``existing``, if given; what they lack is new.
    """
    leaves, structure = jax.tree.flatten(existing)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _start(compiled_part(config), drafter, structure, shapes)(existing)


# kept, as a run that resumes begins like one that does not
@functools.lru_cache(maxsize=4)
def _start(config: TrainConfig, drafter: Any, structure: Any, shapes: tuple) -> Any:
    """A jitted function from existing weights of these shapes to the state before any step."""

    def make(existing: Any) -> TrainState:
        weights_key, anchor_key = jax.random.split(jax.random.key(config.training.seed))
        weights = family_of(drafter).initial_weights(drafter, weights_key)
        if existing is not None:
            weights = with_confidence(existing, weights)
        return TrainState(
            weights=weights,
            optimizer=optimizer_of(config)[0].init(weights),
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(anchor_key),
        )

    state = jax.eval_shape(make, jax.tree.unflatten(structure, shapes))
    return jax.jit(make, out_shardings=state_shardings(config, drafter, state))


def state_shardings(config: TrainConfig, drafter: Any, state: Any) -> Any:
    """Where every array of a training state lives; moments lie beside their weights."""
    mesh, rules = training_mesh(config.mesh), rules_of(config.mesh)
    return weight_shardings(mesh, rules, state, drafter.vocab_size)


def advance(
    config: TrainConfig,
    drafter: Any,
    target: Any,
    state: TrainState,
    target_weights: Any,
    tokens: Int[Array, "B K"],
    loss_mask: Bool[Array, "B K"],
    cached: tuple[Float[Array, "B K n*D"], Float[Array, "B K D"]] | None = None,
) -> tuple[TrainState, StepReport]:
    """Advance by one batch. The ``target`` is frozen; embedding and head are its own.

    ``cached`` holds taps and last hidden states; without it the target computes them, which
    takes its layers.
    """
    optimizer, schedule = optimizer_of(config)
    mesh, vocab_size = training_mesh(config.mesh), drafter.vocab_size
    target_weights = gathered(mesh, target_weights, vocab_size)
    if cached is None:
        cached = target_features(target, target_weights, tokens, drafter.target_layer_ids)
    taps, last_hidden = (part.astype(target_weights.embed.dtype) for part in cached)
    batch = Sequences(tokens=tokens, loss_mask=loss_mask, taps=taps, last_hidden=last_hidden)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    anchors, keep = sample_anchors(key, loss_mask, config.training.num_anchors)

    def objective(weights: Any) -> tuple[Array, Terms]:
        weights = hold_still(weights, config.training.trainable)
        weights = training_weights(drafter, weights, jnp.dtype(config.training.dtype))
        terms = drafter_terms(
            drafter,
            gathered(mesh, weights, vocab_size),
            target_weights.embed,
            target_weights.head,
            batch,
            anchors,
            keep,
            config.loss,
            config.training.anchor_chunk,
            mesh.shape[DATA],
        )
        return terms.loss, terms

    gradient, terms = jax.grad(objective, has_aux=True)(state.weights)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
    updated: Any = optax.apply_updates(state.weights, updates)
    if config.training.trainable == "drafter":
        updated = family_of(drafter).balanced(updated, terms.expert_loads)
    report = StepReport(
        terms=terms,
        learning_rate=jnp.asarray(schedule(state.step)),
        gradient_norm=optax.tree.norm(gradient),
    )
    new = TrainState(
        weights=updated,
        optimizer=optimizer_state,
        step=state.step + 1,
        key=state.key,
    )
    return jax.lax.with_sharding_constraint(new, state_shardings(config, drafter, new)), report


train_step = jax.jit(advance, static_argnums=(0, 1, 2), donate_argnums=3, compiler_options=CUBLAS)
"""`advance` as a program that gives its state away. In a program of your own, call that: JAX
refuses one with compiler options inside another."""
