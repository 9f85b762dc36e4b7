"""Packed query rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.ragged import compact, rectangle


@pytest.mark.parametrize("count", [(2, 0, 3, 1), (0, 0, 0, 0), (3, 3, 3, 1), (0, 0, 0, 3)])
def test_every_row_is_the_place_of_one_query(count):
    tokens, start = jnp.zeros((4, 3), jnp.int32), jnp.zeros(4, jnp.int32)
    packed = compact(tokens, start, jnp.asarray(count), 10)
    places = np.asarray(packed.places())
    real = np.arange(3) < np.asarray(count)[:, None]
    np.testing.assert_array_equal(places[real], np.asarray(packed.row)[real])
    assert sorted(places.ravel())[:10] == list(range(10)), "padding rows belong to absent queries"
    assert len(set(places.ravel())) == places.size


def test_queries_side_by_side_need_no_places():
    tokens, count = jnp.zeros((2, 3), jnp.int32), jnp.full(2, 3)
    assert rectangle(tokens, jnp.zeros(2, jnp.int32), count).places() is None
