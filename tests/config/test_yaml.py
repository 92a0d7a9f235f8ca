"""The YAML of recipes: what words and numbers mean, as pyyaml reads them too, and what is printed is read back."""

import math
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from affinage.config.yaml import as_yaml, parse

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
    assert parse(text, "t").value == value


@given(values)
def test_what_pyyaml_writes_and_what_is_printed_is_read_as_what_it_was(value: object):
    written = [as_yaml(value), yaml.dump(value, allow_unicode=True)]
    if re.search(r"\d[\d_]*e[-+]?\d", str(value)):  # no number to YAML 1.1, which pyyaml writes
        written.pop()
    for text in written if "<<" not in str(value) else ():  # a merge key is refused, quoted or not
        read = parse(text, "t").value
        assert read == value and type(read) is type(value)
        assert not isinstance(value, float) or math.copysign(1, read) == math.copysign(1, value)
