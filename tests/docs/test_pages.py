"""The documentation's links lead somewhere, its commands are the program's, its reference is made from the code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from affinage import api
from affinage.cli import app
from affinage.config.load import packaged_recipes
from affinage.model.layer import LAYERS

ROOT = Path(__file__).parents[2]
WRITTEN = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "reference").rglob("*.md")})


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or "reference/" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), link
        if anchor and place.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", place.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, link


def test_every_page_is_in_the_navigation_and_every_picture_on_a_page():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in WRITTEN if page.name != "README.md"}
    told = set(re.findall(r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert pages == {page for page in told if not page.startswith("reference/")}
    shown = {name for page in WRITTEN for name in re.findall(r"images/([\w-]+\.png)", page.read_text())}
    assert shown == {file.name for file in (ROOT / "docs" / "images").glob("*.png")}


def test_every_command_is_one_of_the_program_and_files_for_schedulers_are_valid():
    lines = [
        line.strip()
        for page in WRITTEN
        for block in re.findall(r"^ *```(?:bash|sh|console)?[^\n]*\n(.*?)^ *```$", page.read_text("utf-8"), re.M | re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = [found[1] for line in lines if (found := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*affinage ([a-z].*)", line))]
    assert len(commands) > 50
    for file in sorted((ROOT / "examples" / "clusters").iterdir()):
        text = file.read_text("utf-8")
        script = YAML(typ="safe").load(text)["run"] if file.suffix == ".yaml" else text
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        found = re.findall(r"^[^#\n]*affinage ((?:run|plan|launch)\b[^#\n;\"]*)", script, re.MULTILINE)
        assert found and "Checked for syntax only" in text
        commands += found
    for line in commands:
        words = re.split(r"\s(?:\||>|&&|#)|;", re.sub(r"'.*?'|\".*?\"", "x", line))[0].split()
        command = get_command(app)
        while (inside := getattr(command, "commands", None)) is not None:
            assert words and (words[0] in inside or "run" in inside), line  # `affinage data RECIPE` is `data run`
            command = inside[words.pop(0)] if words[0] in inside else inside["run"]
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options | {"--help", "--debug"}, line


def reference(folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/reference.py", folder], check=True, timeout=300)


def test_the_reference_has_every_setting_verb_recipe_and_kind(tmp_path: Path):
    reference(tmp_path)
    settings, verbs, recipes, kinds = (
        (tmp_path / f"{name}.md").read_text() for name in ("settings", "verbs", "recipes", "kinds")
    )
    rows = [line.split(" | ") for line in settings.splitlines() if line.startswith("| `")]
    assert len(rows) <= 270 and "language_threshold" in settings and "Share of letters and digits" in settings
    unexplained = [key for key, kind, _, meaning in rows if meaning.strip("| ") == "" and "section" not in kind]
    assert not unexplained, "every setting has a docstring"
    assert "## affinage checkpoint verify" in verbs and "Exit status" in verbs
    assert all(f"## {name}\n" in recipes for name in packaged_recipes())
    assert all(f"## {name}\n" in kinds for name, kind in LAYERS.items() if kind.__module__.startswith("affinage."))


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_the_site_has_docstrings_and_a_link_to_nowhere_ends_its_build(tmp_path: Path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("reference"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    reference(tmp_path / "docs/reference")
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "union-find" in (tmp_path / "site/decisions/04-deduplication.html").read_text()
    assert "check_compatible" in (tmp_path / "site/reference/api/checkpoint.html").read_text()
    page = tmp_path / "docs/index.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    built = build(tmp_path)
    assert built.returncode != 0 and "page does not exist" in built.stderr


def test_the_example_of_the_api_begins_as_it_is_written(capsys: pytest.CaptureFixture[str]):
    """Up to the run of the quickstart, which is dear; the notebook goes further."""
    lines = [line.strip() for line in (api.__doc__ or "").splitlines() if line.startswith("    ")]
    exec("\n".join(lines[: next(at for at, line in enumerate(lines) if "run(" in line)]), {})
    assert capsys.readouterr().out.strip() == str(api.recipe("quickstart").recipe.model["nodes"]["blocks"]["repeat"])
