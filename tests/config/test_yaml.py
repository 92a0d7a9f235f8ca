"""The YAML of recipes: what words and numbers mean, as pyyaml reads them too, and what is printed is read back."""

import copy
import math
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from affinage.config.load import load_recipe, packaged_recipes
from affinage.config.yaml import as_yaml, parse
from affinage.errors import UserError
from affinage.model.graph import parse as parse_graph
from affinage.registry import load_plugins

words = st.text("ab:- #'\"\n,é{}[]&*!%@`|>?~\\<=0123456789.e", max_size=12)
words |= st.sampled_from(["null", "True", "yes", "1e-5", "2026-01-02", "<<", "=", "0x10", "_", "a/b.c-d", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text("ab:- #'é", min_size=1), inside, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("true", True), ("~", None), ("", None), ("1e-3", 1e-3), ("1.5e3", 1500.0),
        ("010", 10), ("50_000", 50000), ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("'1'", "1"), (".5", 0.5),
        ("-.inf", float("-inf")), ("[a, 1]", ["a", 1]), ("1.", 1.0), ("1-2", "1-2"), ("_1", "_1"),
    ],
)  # fmt: skip
def test_words_and_numbers_are_what_a_person_means(text: str, value: object):
    assert parse(text, "t")[0] == value


@given(values)
def test_what_pyyaml_writes_and_what_is_printed_is_read_as_what_it_was(value: object):
    written = [as_yaml(value), yaml.dump(value, allow_unicode=True)]
    if re.search(r"\d[\d_]*e[-+]?\d", str(value)):  # no number to YAML 1.1, which pyyaml writes
        written.pop()
    for text in written if "<<" not in str(value) else ():  # a merge key is refused, quoted or not
        read = parse(text, "t")[0]
        assert read == value and type(read) is type(value)
        assert not isinstance(value, float) or math.copysign(1, read) == math.copysign(1, value)


RECIPES = {name: yaml.safe_load(file.read_text()) for name, file in packaged_recipes().items()}
WORDS = ["", "x", "../..", "~nobody/x", "a" * 5000, "\x00", "${HOME}", "auto", "null", "1e5", "0x10", "nan", "é"]
WORDS += ["http://[", "gs://"]
NUMBERS = [0, -1, 1, 3, 64, 10**9, 2**70, -(2**70), 0.5, 1e-9, 1e308, float("inf"), float("nan")]
ODD = [None, True, False, [], {}, [[]], [None], [1, "x", {}], {"": 1}, {1: 2}, {None: None}, {"a": {}}, b"abc"]
PIECES = b"&a |*a|!!python/name:os.system |{|[|: |- |\t|%|<<: |? |\xff|\x00|\r".split(b"|")


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def taken_or_refused(file) -> None:
    try:
        loaded = load_recipe(file)
        load_plugins(loaded)
        parse_graph(loaded.recipe.model, vocabulary=100)
    except UserError as error:
        assert error.what.strip()


def a_value(data: st.DataObject, file) -> None:
    found = copy.deepcopy(RECIPES[data.draw(st.sampled_from(sorted(RECIPES)))])
    *above, last = data.draw(st.sampled_from([path for path in places(found) if path]))
    within = found
    for key in above:
        within = within[key]
    within[last] = data.draw(st.sampled_from([*WORDS, *NUMBERS, *ODD]))
    file.write_text(yaml.dump(found, allow_unicode=True))


def some_bytes(data: st.DataObject, file) -> None:
    found = packaged_recipes()[data.draw(st.sampled_from(sorted(RECIPES)))].read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        at, gone = data.draw(st.integers(0, len(found) - 1)), data.draw(st.integers(0, 20))
        found = found[:at] + data.draw(st.sampled_from(PIECES)) + found[at + gone :]
    file.write_bytes(found)


@pytest.mark.parametrize("change", [a_value, some_bytes])
@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.full)])
def test_anything_anywhere(change, examples: int, tmp_path):
    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        change(data, tmp_path / "recipe.yaml")
        taken_or_refused(tmp_path / "recipe.yaml")

    check()
