"""`affinage report`: where it writes, and in which language."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def report(run: Path, monkeypatch: pytest.MonkeyPatch, affinage):
    """Call the verb on a run, beside it: (status, standard output, standard error)."""
    monkeypatch.chdir(run.parent)
    return lambda *words: affinage("report", "synthetic", "--runs", ".", *words)


def test_one_line_and_the_file_and_a_french_one_beside_it(report, run: Path):
    status, out, _ = report()
    line, place = out.splitlines()
    page = (run / "report.html").read_text()
    assert status == 0 and line.startswith("A model of 1.44M parameters") and line in page
    assert "synthetic/report.html" in place
    status, out, _ = report("--lang", "fr", "--out", "ici/rapport.html", "--json")
    told, french = json.loads(out), (run.parent / "ici/rapport.html").read_text()
    assert status == 0 and told["language"] == "fr" and told["report"] == "ici/rapport.html"
    assert told["bytes"] == len(french.encode()) and told["summary"] in french and '<html lang="fr">' in french
    assert (run / "report.html").read_text() == page


def test_where_nothing_can_be_written(report, run: Path):
    (run.parent / "folder").mkdir()
    (run.parent / "file").touch()
    for place in ("folder", "file/page.html", "/dev/full/x"):
        status, out, said = report("--out", place)
        assert (status, out) == (2, "") and said.startswith(f"Error: {place}: ")
    assert sorted(file.name for file in run.parent.iterdir()) == ["file", "folder", "synthetic"]
