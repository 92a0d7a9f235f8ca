"""`affinage report`: where it writes, in which language, and what it says of the run."""

import json
from pathlib import Path

import pytest
from synthetic_run import build_run

from affinage.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    build_run(folder, steps=60)
    return folder


@pytest.fixture
def report(runs, tmp_path, monkeypatch, capsys):
    """Call the verb: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["report", "synthetic", "--runs", str(runs), *words])
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_one_line_and_the_file(report, runs):
    status, out, _ = report()
    line, place = out.splitlines()
    assert status == 0 and line.startswith("A model of 1.44M parameters, pretrained on 61.4k tokens and fine-tuned")
    assert place == f"The report is in {runs / 'synthetic' / 'report.html'}."
    assert line in (runs / "synthetic" / "report.html").read_text()


def test_in_french_beside_the_english_one(report, runs, tmp_path):
    report()
    before = (runs / "synthetic" / "report.html").read_bytes()
    status, out, _ = report("--lang", "fr", "--out", "ici/rapport.html", "--json")
    told, page = json.loads(out), (tmp_path / "ici/rapport.html").read_text()
    assert status == 0 and told["language"] == "fr" and told["report"] == "ici/rapport.html"
    assert told["bytes"] == len(page.encode()) and told["summary"] in page and '<html lang="fr">' in page
    assert (runs / "synthetic" / "report.html").read_bytes() == before


def test_where_nothing_can_be_written(report, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for place, why in (("folder", "Is a directory"), ("file/page.html", ""), ("/dev/full/x", "")):
        status, out, said = report("--out", place)
        assert (status, out) == (2, "") and f"Error: {place}: cannot be written: {why}" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]
