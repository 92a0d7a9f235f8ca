"""`affinage report`: where it writes, and in which language."""

import json
from pathlib import Path


def test_one_line_and_the_file_and_a_french_one_beside_it(run: Path, monkeypatch, affinage):
    monkeypatch.chdir(run.parent)
    words = ("report", "synthetic", "--runs", ".")
    status, out, _ = affinage(*words)
    line, place = out.splitlines()
    page = (run / "report.html").read_text()
    assert status == 0 and line.startswith("A model of 1.44M parameters") and line in page
    assert "synthetic/report.html" in place
    status, out, _ = affinage(*words, "--lang", "fr", "--out", "ici/rapport.html", "--json")
    told, french = json.loads(out), (run.parent / "ici/rapport.html").read_text()
    assert status == 0 and told["language"] == "fr" and told["report"] == "ici/rapport.html"
    assert told["bytes"] == len(french.encode()) and told["summary"] in french and '<html lang="fr">' in french
    assert (run / "report.html").read_text() == page
