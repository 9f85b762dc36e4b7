"""The devices of a run: their mesh, and which axis of each array lives on which axis of it.

One device is a mesh of one; the step has no path of its own for it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

DATA, VOCABULARY = "data", "vocabulary"


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """How devices are laid out.

    ``data`` of them share the sequences of a batch (0: all that are left), ``vocabulary`` the
    rows of embedding, LM head and Markov tables. ``shard_weights`` spreads weights and optimizer
    state over the data axis too, as FSDP does; they are gathered where they are used.
    ``distributed`` joins several processes (``jax.distributed.initialize``).
    """

    data: int = 0
    vocabulary: int = 1
    shard_weights: bool = False
    distributed: bool = False

    def __post_init__(self) -> None:
        """Refuse axes without devices."""
        for name, least in (("data", 0), ("vocabulary", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"mesh.{name} is {value}; it must be at least {least}")


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axes to mesh axes; None keeps an axis whole."""

    batch: str | None = DATA
    vocabulary: str | None = VOCABULARY
    weights: str | None = None


@functools.cache
def training_mesh(section: MeshSection) -> Mesh:
    """The mesh of a run over all devices of all its processes.

    Raises:
        ValueError: fewer or more devices than the axes hold.
    """
    count = jax.device_count()
    data = section.data or max(1, count // section.vocabulary)
    if data * section.vocabulary != count:
        raise ValueError(
            f"a mesh of data {data} x vocabulary {section.vocabulary} holds "
            f"{data * section.vocabulary} devices; this run has {count}"
        )
    return jax.make_mesh(
        (data, section.vocabulary), (DATA, VOCABULARY), axis_types=(AxisType.Auto,) * 2
    )


def rules_of(section: MeshSection) -> ShardingRules:
    """The rules that a mesh section asks for."""
    return ShardingRules(weights=DATA if section.shard_weights else None)


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Of arrays whose first axis counts the sequences of a batch."""
    return NamedSharding(mesh, PartitionSpec(rules.batch))


def weight_shardings(mesh: Mesh, rules: ShardingRules, tree: PyTree, vocab_size: int) -> PyTree:
    """A sharding for every array of ``tree`` (weights of a drafter or a target, or abstract ones).

    An axis as long as the vocabulary goes to the vocabulary axis of the mesh; under sharded
    weights the longest other axis that divides evenly goes to the data axis.
    """

    def place(leaf: Any) -> NamedSharding:
        axes: list[str | None] = [None] * leaf.ndim
        table = leaf.ndim == 2 and leaf.shape[0] == vocab_size
        if table and _splits(mesh, rules.vocabulary, vocab_size):
            axes[0] = rules.vocabulary
        free = [
            i
            for i, length in enumerate(leaf.shape)
            if axes[i] is None and _splits(mesh, rules.weights, length)
        ]
        if free and jnp.issubdtype(leaf.dtype, jnp.floating):
            axes[max(free, key=lambda i: leaf.shape[i])] = rules.weights
        # the form that a jitted step's results come back in: another one would trace it again
        while axes and axes[-1] is None:
            axes.pop()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(place, tree)


def _splits(mesh: Mesh, axis: str | None, length: int) -> bool:
    """Whether a length divides over a mesh axis of more than one device."""
    return axis is not None and mesh.shape[axis] > 1 and length % mesh.shape[axis] == 0


def gathered(mesh: Mesh, tree: PyTree, vocab_size: int) -> PyTree:
    """Inside a jitted step: weights as products use them, whole but for vocabulary rows.

    Without this the partitioner would spread activations the way the weights lie, and move
    those instead.
    """
    return jax.lax.with_sharding_constraint(
        tree, weight_shardings(mesh, ShardingRules(), tree, vocab_size)
    )


def place_batch(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A batch that every process holds whole, as one global array; each puts its own rows."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def whole(mesh: Mesh, tree: PyTree) -> PyTree:
    """``tree`` with every array whole on every device."""
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
