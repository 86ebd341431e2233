"""A prediction is judged only beyond the scatter of its control."""

import math

import numpy as np
import pytest

from bench.teaching import exceeds, verdict

PARTS = {(True, np.True_): "held", (True, None): "undecided", (None, False): "missed", (np.False_, None): "missed"}


@pytest.mark.parametrize(("held", "word"), [(np.True_, "held"), (False, "missed"), (None, "undecided"), *PARTS.items()])
def test_a_verdict_knows_three_words(held, word, capsys) -> None:
    verdict(3, held, "2x")
    assert capsys.readouterr().out == f"Prediction 3 {word}: 2x\n"


def test_a_value_is_above_a_bound_only_by_more_than_the_control_is_off() -> None:
    assert [exceeds(value, 2.0, [1.1, 1.0]) for value in (2.3, 2.1, 1.9, 1.7)] == [True, None, None, False]
    assert [exceeds(value, 2.0, [0.8, 1.1]) for value in (2.6, 2.4, 1.7, 1.5)] == [True, None, None, False]
    assert [exceeds(value, 2.0, [1.0]) for value in (2.01, 2.0, math.nan)] == [True, None, None]
