"""Many small arrays as one, on their way between host and device: every copy has its price."""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

WORDS = frozenset(map(np.dtype, (np.bool_, np.int32, np.uint32, np.float32)))
"""What is packed."""

Layout = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""Structure of the tree; shape and dtype of each of its arrays, in order."""


@flax.struct.dataclass
class Packed:
    """Arrays of 32 bits behind each other; booleans take a word each.

    ``layout`` is static: a jitted function that takes or returns packed trees knows their shapes.
    """

    words: Int[Array, "N"]
    layout: Layout = flax.struct.field(pytree_node=False)


def pack(tree: Any) -> Packed:
    """Pack the arrays of a tree: on the host those of NumPy, on the device those of JAX.

    Raises:
        TypeError: an array of another dtype than bool, int32, uint32 or float32.
    """
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if leaf.dtype not in WORDS:
            raise TypeError(f"an array has dtype {leaf.dtype}; wanted bool or one of 32 bits")
    layout = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        words: Any = [
            (leaf.astype(np.int32) if leaf.dtype == np.bool_ else leaf.view(np.int32)).ravel()
            for leaf in map(np.ascontiguousarray, leaves)
        ]
        return Packed(np.concatenate(words), layout)  # pyright: ignore[reportArgumentType]
    words = [
        leaf.astype(jnp.int32)
        if leaf.dtype == jnp.bool_
        else jax.lax.bitcast_convert_type(leaf, jnp.int32)
        for leaf in leaves
    ]
    return Packed(jnp.concatenate([one.ravel() for one in words]), layout)


def unpack(packed: Packed) -> Any:
    """The tree again: on the host views of the words, where they are NumPy's."""
    structure, arrays = packed.layout
    begin, leaves = 0, []
    for shape, dtype in arrays:
        words = packed.words[begin : begin + math.prod(shape)].reshape(shape)
        begin += math.prod(shape)
        if dtype == np.bool_:
            leaves.append(words != 0)
        elif isinstance(words, np.ndarray):
            leaves.append(words.view(dtype))
        else:
            leaves.append(jax.lax.bitcast_convert_type(words, dtype))
    return jax.tree.unflatten(structure, leaves)
