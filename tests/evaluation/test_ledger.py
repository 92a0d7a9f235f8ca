"""Answers survive a kill: what was written is not scored again, what was cut off is."""

import os
import signal
import subprocess
import sys

import pytest

from affinage.evaluation.ledger import Ledger
from affinage.evaluation.scoring import Scorer
from tiny_models import tiny_llama

PAIRS = [([2, 270 + n], [280, 290 + n]) for n in range(40)]


def test_what_is_known_is_not_scored_again(tmp_path):
    model = tiny_llama()
    expected = Scorer(model).score(PAIRS)
    assert Scorer(model, ledger=Ledger(tmp_path / "a", "tiny")).score(PAIRS[:25]) == expected[:25]
    again = Ledger(tmp_path / "a", "tiny")
    assert len(again) == 25
    again.put(*PAIRS[3], (-1.5, True))  # to see that it is the ledger that answers
    results = Scorer(model, ledger=again).score(PAIRS)
    assert results[3] == (-1.5, True)
    assert [r[0] for r in results[4:]] == pytest.approx([e[0] for e in expected[4:]], abs=1e-4)
    assert len(Ledger(tmp_path / "a", "tiny")) == 40
    assert len(Ledger(tmp_path / "a", "another model")) == 0


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
