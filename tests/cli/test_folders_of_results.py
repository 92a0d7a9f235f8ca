"""Where a model's results are kept: one folder for each path, however it is written."""

from pathlib import Path

from affinage.cli.judge import folder_of


def test_models_of_different_paths_have_different_folders(tmp_path: Path, monkeypatch):  # type: ignore[no-untyped-def]
    here = tmp_path / "here"
    for place in ("a/m", "../a/m", "a-m", "runs/quick/sft", "runs/quick-sft"):
        (here / place).mkdir(parents=True)
    monkeypatch.chdir(here)
    runs = Path("runs")
    different = ["a/m", "../a/m", "a-m", "quick", "quick/sft", "quick-sft", "quick@10", "quick/sft@10", "a/m@10"]
    found = [folder_of(name, runs) for name in different]
    assert len(set(found)) == len(different)
    assert all(folder.parent == runs / "evaluations" for folder in found)
    assert folder_of("quick", runs) == runs / "evaluations/quick"
    assert folder_of("quick/sft@10", runs).name.startswith("quick-sft-")
    for one, other in (("a/m", f"{here}/a/m/"), ("./a/m", "a/m"), ("quick/sft", "runs/quick/sft/")):
        assert folder_of(one, runs) == folder_of(other, runs)
