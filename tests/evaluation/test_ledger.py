"""Answers survive a kill: what was written is not scored again, what was cut off is."""

import pytest
from lm_eval.api.instance import Instance

from affinage.evaluation.backend import JaxLM
from affinage.evaluation.ledger import Ledger
from affinage.evaluation.scoring import Scorer
from tiny_models import tiny_llama

PAIRS = [([2, 270 + n], [280, 290 + n]) for n in range(40)]


def test_what_is_known_is_not_scored_again(tmp_path):
    model = tiny_llama()
    expected = Scorer(model).score(PAIRS)
    part = Scorer(model, ledger=Ledger(tmp_path / "a", "tiny")).score(PAIRS[:25])
    # Products of other batches round otherwise on some processors.
    assert [r[0] for r in part] == pytest.approx([e[0] for e in expected[:25]], abs=1e-4)
    assert [r[1] for r in part] == [e[1] for e in expected[:25]]
    again = Ledger(tmp_path / "a", "tiny")
    assert len(again) == 25
    again.put(*PAIRS[3], (-1.5, True))  # to see that it is the ledger that answers
    results = Scorer(model, ledger=again).score(PAIRS)
    assert results[:25] == [*part[:3], (-1.5, True), *part[4:]]
    assert [r[0] for r in results[4:]] == pytest.approx([e[0] for e in expected[4:]], abs=1e-4)
    assert len(Ledger(tmp_path / "a", "tiny")) == 40
    assert len(Ledger(tmp_path / "a", "another model")) == 0


def test_greedy_texts_are_kept_too_and_a_stop_in_the_middle_costs_what_was_not_written(tmp_path):
    model, words = tiny_llama(), ["two", "three", "twenty", "four hundred", "five"]
    tokens = model.context * 3 // 4  # shorter rows would all be one batch

    def asked(drawn, count=5):
        told = {"do_sample": drawn, "max_gen_toks": tokens, "temperature": 1.0}
        return [Instance("generate_until", {}, (f"{word} plus seven is", told), 0) for word in words[:count]]

    def generated(requests, ledger=None, progress=lambda _: None):
        return JaxLM(model, batch=2, ledger=ledger, progress=progress).generate_until(requests)

    def stops(line):
        if line == "generated 4 texts":
            raise KeyboardInterrupt

    expected = generated(asked(drawn=False))
    with pytest.raises(KeyboardInterrupt):
        generated(asked(drawn=False), Ledger(tmp_path / "a", "tiny"), stops)
    left, told = Ledger(tmp_path / "a", "tiny"), []
    assert len(left) == 4, "two batches of two"
    assert generated(asked(drawn=False), left, told.append) == expected
    assert set(told) == {"generated 5 texts"} and len(Ledger(tmp_path / "a", "tiny")) == 5
    generated(asked(drawn=True, count=2), left)
    assert len(left) == 5, "what is drawn is not kept"


def test_a_line_cut_off_is_forgotten_and_what_follows_is_whole(tmp_path):
    ledger = Ledger(tmp_path / "a", "tiny")
    for number, pair in enumerate(PAIRS):
        ledger.put(*pair, (-float(number), False))
    ledger.flush()
    whole = (tmp_path / "a").read_bytes()
    for cut in (1, 60, len(whole) - 3):
        (tmp_path / "a").write_bytes(whole[:-cut])
        left = Ledger(tmp_path / "a", "tiny")
        assert len(left) < 40
        left.put(*PAIRS[39], (-39.0, False))
        left.flush()
        found = Ledger(tmp_path / "a", "tiny")
        assert len(found) == len(left) and found.get(*PAIRS[39]) == (-39.0, False)
