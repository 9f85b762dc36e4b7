"""Parameters of a request are checked where they are written."""

import pytest

from dspark_jax.decode.request import NOT_YET, Completion, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**32),
        ("max_new_tokens", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", b"END"),
        ("stop_token_ids", 5),
        ("top_k", 1.5),
        ("max_new_tokens", 2.5),
        ("seed", 1.5),
        ("logprobs", 1.5),
        ("temperature", "1"),
        ("top_p", None),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_a_parameter_that_is_not_supported_yet_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported yet"):
        SamplingParams(**{name: 1})


def test_an_unknown_parameter_is_pythons_own_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_one_stop_string_and_lists_of_ids_are_accepted():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)


def completion(windows, commits, reason):
    tokens = tuple(range(sum(commits)))
    return Completion((1,), tokens, None, reason, windows, windows, commits, None)


def test_accepted_length_counts_a_stop_inside_a_block_without_bonus():
    stopped = completion((7,), (3,), "stop")
    assert stopped.accepted_length == 3
    assert stopped.proposed == (3,)
    cut_by_length = completion((7, 2), (8, 3), "length")
    assert cut_by_length.accepted_length == 5.5
    assert cut_by_length.proposed == (7, 2)


def test_an_answer_without_a_step_has_no_accepted_length():
    empty = completion((), (), "abort")
    assert empty.accepted_length is None
    assert empty.proposed == ()
