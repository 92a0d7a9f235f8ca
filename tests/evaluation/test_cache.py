"""Answers survive a kill: what was kept is not computed again, and an answer of another model is not used."""

import pytest
from lm_eval.api.instance import Instance

from affinage.evaluation.backend import JaxLM
from affinage.evaluation.harness import cached
from tiny_models import tiny_llama

WORDS = ["two", "three", "twenty", "four hundred", "five"]


def texts(lm, words=WORDS, sampled=False):
    told = {"do_sample": sampled, "max_gen_toks": 90, "temperature": 1.0}
    return lm.generate_until([Instance("generate_until", {}, (f"{word} plus seven is", told), 0) for word in words])


def test_a_stop_in_the_middle_keeps_what_was_answered(tmp_path):
    def stops(line):
        if line.startswith("generated 4 "):
            raise KeyboardInterrupt

    first = cached(JaxLM(tiny_llama(), batch=2, progress=stops), tmp_path / "a", "tiny")
    with pytest.raises(KeyboardInterrupt):
        texts(first)
    first.dbdict.close()
    lm = JaxLM(tiny_llama(), batch=2)
    again = cached(lm, tmp_path / "a", "tiny")
    assert texts(again) == texts(JaxLM(tiny_llama())) and lm.requests <= 2  # four were answered, in batches of two
    again.dbdict.close()
