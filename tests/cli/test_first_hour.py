"""What people who came to affinage for the first time stumbled over."""

from pathlib import Path

import pytest

from affinage.cli import main
from affinage.cli.watch import headline
from affinage.data.documents import DocumentWriter
from affinage.data.occurrences import occurrences
from affinage.recipe.load import load_recipe


def said(capsys, *words: object) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    told = capsys.readouterr()
    return end.value.code, told.out, told.err


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("Une phrase assez longue pour être un document. " * 20, encoding="utf-8")
    return folder


def test_whose_text_is_ones_own_is_told_what_is_still_the_bases(capsys, tmp_path: Path, texts: Path):
    words = ("--dry-run", "--runs", tmp_path / "runs", "--set", f"data.sources=[{texts}]")
    status, _, err = said(capsys, "run", "quickstart", *words)
    assert status == 0
    settings = ("sft.sources", "dpo.sources", "evaluate.tasks", "sft.watch.tasks")
    assert all(setting in err for setting in settings) and "dpo.watch" not in err
    nothing_more = [word for key in ("sft", "dpo", "evaluate") for word in ("--set", f"{key}=null")]
    status, _, err = said(capsys, "run", "quickstart", *words, *nothing_more)
    assert (status, err) == (0, "")
    status, _, err = said(capsys, "run", "quickstart", *words, *nothing_more, "--set", "report.prompts=[Bonjour]")
    assert status == 0 and "nobody asks" in err
    assert said(capsys, "run", "quickstart", "--dry-run", "--runs", tmp_path / "runs")[2] == ""


def test_a_mistake_is_told_instead_of_a_plan(capsys, tmp_path: Path):
    missing = f"data.sources=[{tmp_path / 'gone'}/]"
    status, out, err = said(capsys, "run", "quickstart", "--dry-run", "--runs", tmp_path / "runs", "--set", missing)
    assert status == 2 and out == "" and "gone" in err


def test_a_recipe_is_not_described_by_its_base(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: quickstart\nname: mine\n")
    assert load_recipe("quickstart").recipe.description
    assert load_recipe(mine).recipe.description == ""


def test_what_is_said_of_a_text_is_not_said_of_another(tmp_path: Path):
    def said_with(*overrides: str, recipe: str | Path = "quickstart") -> tuple[bool, bool, bool]:
        found = load_recipe(recipe, overrides).recipe
        return bool(found.description), bool(found.report.prompts), bool(found.report.questions)

    assert said_with() == (True, True, True)
    assert said_with("data.sources=[mine/]") == (False, False, True), "its chats are still the pocket world's"
    assert said_with("data.sources=[mine/]", "sft.sources=[chats.jsonl]") == (False, False, False)
    assert said_with("data.sources.0.path=mine/") == (False, False, True)
    for of_the_same in ("data.sources=[{path: pocket-world, megabytes: 1}]", "data.sources.0.megabytes=1"):
        assert said_with(of_the_same) == (True, True, True), "less of the same text"
    for own in (("report.prompts=[Hello]", "description=mine"), ("report={prompts: [Hello]}", "description=mine")):
        assert said_with("data.sources=[mine/]", *own) == said_with(*own, "data.sources=[mine/]") == (True, True, True)
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: quickstart\nname: mine\nreport: {prompts: [Hello]}\ndata: {sources: [mine/]}\n")
    assert load_recipe(mine).recipe.report.prompts == ("Hello",)
    mine.write_text("base: quickstart\nname: mine\ndescription: mine\ndata: {sources: [mine/]}\n")
    assert said_with(recipe=mine) == (True, False, True)


def test_what_is_taken_in_and_where_to_are_not_confused(capsys, tmp_path: Path, texts: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = said(capsys, "import", "texts")
    assert status == 2 and "would be written" in err and "--to" in err
    status, _, err = said(capsys, "import", "texts", "--to", "model")
    assert status == 2 and "this is no model" in err and "Errno" not in err


def test_the_scores_are_told_where_they_were_made():
    acc, norm = {"value": 0.45, "stderr": 0.114}, {"value": 0.3, "stderr": 0.01}
    tasks = {"arc_easy": {"metrics": {"acc": acc}}, "hellaswag": {"metrics": {"acc": acc, "acc_norm": norm}}}
    assert list(headline({"tasks": tasks})) == ["2 benchmarks: arc_easy 45.0 ± 11.4, hellaswag 30.0 ± 1.0"]
    assert list(headline({"tasks": {"facts": 300, "agreement": 200}})) == ["2 tasks"]


def test_too_few_documents_to_judge_by_are_told():
    few, enough = ({"documents_out": 500, "validation_documents": number} for number in (1, 25))
    assert "few to judge by" in " ".join(headline(few)) and "few" not in " ".join(headline(enough))


@pytest.mark.parametrize("wanted", ["J'appelle (trop)", "j’APPELLE (trop)", "jʼappelle (TROP)"])
def test_a_text_is_found_as_it_is_typed(tmp_path: Path, wanted: str):
    text = "Là, j’appelle (trop). J'appelle (trop) encore."
    with DocumentWriter(tmp_path) as writer:
        writer.add(id="a", text=text, source="s", language="fr")
        writer.add(id="b", text="j’appelle trop", source="s", language="fr")
    (found,) = occurrences(tmp_path, wanted)
    assert found.id == "a" and [text[at] for at in found.at] == ["j", "J"]
