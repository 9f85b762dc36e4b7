"""Packed query rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.ragged import Packed, compact, rectangle

pack = jax.jit(compact, static_argnums=3)
places_of = jax.jit(Packed.places)


@pytest.mark.parametrize("count", [(2, 0, 3, 1), (0, 0, 0, 0), (3, 3, 3, 1), (0, 0, 0, 3)])
def test_every_row_is_the_place_of_one_query(count):
    tokens, start = np.zeros((4, 3), np.int32), np.zeros(4, np.int32)
    packed = pack(tokens, start, np.asarray(count, np.int32), 10)
    places = np.asarray(places_of(packed))
    real = np.arange(3) < np.asarray(count)[:, None]
    np.testing.assert_array_equal(places[real], np.asarray(packed.row)[real])
    assert sorted(places.ravel())[:10] == list(range(10)), "padding rows belong to absent queries"
    assert len(set(places.ravel())) == places.size


def test_queries_side_by_side_need_no_places():
    tokens, count = jnp.zeros((2, 3), jnp.int32), jnp.full(2, 3)
    assert rectangle(tokens, jnp.zeros(2, jnp.int32), count).places() is None
