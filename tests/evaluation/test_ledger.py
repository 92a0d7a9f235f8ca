"""Answers survive a kill: what was written is not scored again, what was cut off is."""

import os
import signal
import subprocess
import sys

import pytest
from lm_eval.api.instance import Instance

from affinage.evaluation.backend import JaxLM
from affinage.evaluation.ledger import Ledger
from affinage.evaluation.scoring import Scorer
from affinage.generation.decode import Generator, Request
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


def test_greedy_texts_are_kept_too_and_a_stop_in_the_middle_costs_what_was_not_written(tmp_path, monkeypatch):
    def asked(settings, words):
        return [Instance("generate_until", {}, (f"{word} plus seven is", settings), 0) for word in words]

    tokens = tiny_llama().context * 3 // 4  # shorter rows would all be one batch
    greedy, drawn = ({"do_sample": flag, "max_gen_toks": tokens, "temperature": 1.0} for flag in (False, True))
    words = ["two", "three", "twenty", "four hundred", "five"]
    expected = JaxLM(tiny_llama(), batch=2).generate_until(asked(greedy, words))

    monkeypatch.setattr("affinage.evaluation.ledger._SECONDS", 0.0)
    progressed = Generator._progress
    began: list[int] = []

    def dies(self, request):
        began.append(1)
        if len(began) > 4:
            raise KeyboardInterrupt
        return progressed(self, request)

    monkeypatch.setattr(Generator, "_progress", dies)
    with pytest.raises(KeyboardInterrupt):
        JaxLM(tiny_llama(), batch=2, ledger=Ledger(tmp_path / "a", "tiny")).generate_until(asked(greedy, words))
    left = Ledger(tmp_path / "a", "tiny")
    assert len(left) == 4, "two batches of two"
    began.clear()
    assert JaxLM(tiny_llama(), batch=2, ledger=left).generate_until(asked(greedy, words)) == expected
    assert len(began) == 1 and len(Ledger(tmp_path / "a", "tiny")) == 5
    began.clear()
    JaxLM(tiny_llama(), batch=2, ledger=left).generate_until(asked(drawn, words[:2]))
    assert len(left) == 5, "what is drawn is not kept"


def test_a_text_is_not_taken_from_where_it_was_to_end_otherwise(tmp_path, monkeypatch):
    def said() -> str:
        asked = Instance("generate_until", {}, ("two plus seven is", {"max_gen_toks": 12}), 0)
        ledger = Ledger(tmp_path / "a", "tiny")
        lm = JaxLM(model, ledger=ledger)
        return lm.generate_until([asked])[0]

    model = tiny_llama()
    before = said()
    third = Generator(model).generate([JaxLM(model).tok_encode("two plus seven is")], Request(12))[0].tokens[2]
    monkeypatch.setattr(type(model.tokenizer), "_stops", (third,))  # as of a folder whose eos_token was mended
    assert len(said()) < len(before)


def test_a_line_cut_off_is_forgotten_and_what_follows_is_whole(tmp_path):
    ledger = Ledger(tmp_path / "a", "tiny")
    for number, pair in enumerate(PAIRS):
        ledger.put(*pair, (-float(number), False))
    ledger.flush()
    whole = (tmp_path / "a").read_bytes()
    for cut in (1, 2, 17, 60, len(whole) - 3):
        (tmp_path / "a").write_bytes(whole[:-cut])
        left = Ledger(tmp_path / "a", "tiny")
        assert len(left) < 40
        left.put(*PAIRS[39], (-39.0, False))
        left.flush()
        found = Ledger(tmp_path / "a", "tiny")
        assert len(found) == len(left) and found.get(*PAIRS[39]) == (-39.0, False)


def test_a_killed_process_leaves_what_it_had(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; from affinage.evaluation.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), 'tiny')\n"
        "for n in range(30):\n"
        "    ledger.put([2, n], [n], (-float(n), True))\n"
        "    if n == 19: ledger.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    left = Ledger(tmp_path / "a", "tiny")
    assert len(left) == 20 and left.get([2, 7], [7]) == (-7.0, True) and left.get([2, 25], [25]) is None
