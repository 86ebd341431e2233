"""A finished training is taken for another one's by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.results import write_json
from t5accel.errors import InputError
from training.train import SETTINGS, require_settings, settings_of


def test_a_finished_training_with_other_settings_or_pairs_is_refused(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\tb\n")
    settings = settings_of(pairs, steps=2, layers=(0,))
    with pytest.raises(InputError, match="other settings, None"):
        require_settings(tmp_path, settings)
    write_json(tmp_path / SETTINGS, settings)
    assert require_settings(tmp_path, settings_of(pairs, steps=2, layers=(0,)))
    with pytest.raises(InputError, match="other settings"):
        require_settings(tmp_path, settings_of(pairs, steps=3, layers=(0,)))
    pairs.write_text("a\tc\n")
    with pytest.raises(InputError, match="other settings"):
        require_settings(tmp_path, settings_of(pairs, steps=2, layers=(0,)))
