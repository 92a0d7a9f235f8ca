"""Answers survive a kill: what was kept is not computed again, and an answer of another model is not used."""

import pytest
from lm_eval.api.instance import Instance

from affinage.evaluation.backend import JaxLM
from affinage.evaluation.harness import cached
from tiny_models import tiny_llama

PAIRS = [("one plus two is", f" {word}") for word in ("one", "two", "three", "four", "five", "six")]
WORDS = ["two", "three", "twenty", "four hundred", "five"]


def scores(lm, pairs=PAIRS):
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    return [(pytest.approx(value, abs=1e-4), greedy) for value, greedy in found]


def texts(lm, words=WORDS, sampled=False):
    told = {"do_sample": sampled, "max_gen_toks": 90, "temperature": 1.0}
    return lm.generate_until([Instance("generate_until", {}, (f"{word} plus seven is", told), 0) for word in words])


def test_what_is_known_is_not_computed_again(tmp_path):
    expected = scores(JaxLM(tiny_llama())), texts(JaxLM(tiny_llama()))
    first = cached(JaxLM(tiny_llama()), tmp_path / "new" / "a", "tiny")
    assert scores(first, PAIRS[:4]) == expected[0][:4] and texts(first, WORDS[:2]) == expected[1][:2]
    first.dbdict.close()
    lm = JaxLM(tiny_llama())
    again = cached(lm, tmp_path / "new" / "a", "tiny")
    assert (scores(again), texts(again)) == expected and lm.requests == 2 + 3
    texts(again, sampled=True)
    assert lm.requests == 5 + len(WORDS), "what is drawn is drawn again"
    again.dbdict.close()
    lm = JaxLM(tiny_llama())
    other = cached(lm, tmp_path / "new" / "a", "another")
    assert scores(other) == expected[0] and lm.requests == len(PAIRS)
    other.dbdict.close()


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
