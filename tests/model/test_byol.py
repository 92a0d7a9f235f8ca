"""What the example of BYOL learns without labels."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "byol"))

import byol


@pytest.mark.full
def test_its_features_of_digits_are_better_than_those_untrained(tmp_path):
    for scores in byol.run(tmp_path, steps=900, draws=5).values():
        assert scores["trained"] > max(scores["untrained"], scores["pixels"]) + 0.005
