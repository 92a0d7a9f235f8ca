"""What is printed as YAML is read back as what it was."""

import math

import pytest
import yaml

from affinage.recipe.training import ScheduleSettings
from affinage.recipe.yaml_text import as_yaml


@pytest.mark.parametrize(
    "value",
    [
        1e-5,
        2.5e300,
        -0.0,
        1.0,
        7,
        True,
        None,
        math.inf,
        -math.inf,
        "",
        "yes",
        "~",
        "null",
        "1e-5",
        "a: b",
        "- a",
        "é#b",
        "line\nline",
        'say "no"',
        "back\\slash",
        [1, [], {}],
        {"a": {"b c": [None, "x, y"]}, "on": "{}"},
        {},
    ],
    ids=repr,
)
def test_it_reads_back(value: object):
    read = yaml.safe_load(as_yaml(value))
    assert read == value and type(read) is type(value)


def test_settings_are_mappings():
    settings = ScheduleSettings(name="cosine", peak=1e-4, floor=0.1)
    assert ScheduleSettings.model_validate(yaml.safe_load(as_yaml(settings))) == settings
