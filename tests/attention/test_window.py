"""A window's shape is known on the host, and whether all rows have one length."""

import pytest

from peregrine.attention import Window
from peregrine.errors import ConfigError


def test_uniform() -> None:
    window = Window.uniform(4, 5)
    assert (window.num_rows, window.num_tokens, window.max_q_len, window.q_len) == (4, 20, 5, 5)


def test_ragged() -> None:
    window = Window.ragged([7, 3])
    assert (window.num_rows, window.num_tokens, window.max_q_len, window.q_len) == (2, 10, 7, None)


def test_equal_lengths_are_uniform() -> None:
    assert Window.ragged([3, 3]) == Window.uniform(2, 3)
    assert Window.ragged([9]) == Window.uniform(1, 9)


@pytest.mark.parametrize("lens", [[], [3, 0], [-1]])
def test_empty_rows_are_refused(lens: list[int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        Window.ragged(lens)


@pytest.mark.parametrize(("rows", "q_len"), [(0, 1), (1, 0)])
def test_empty_windows_are_refused(rows: int, q_len: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Window.uniform(rows, q_len)
