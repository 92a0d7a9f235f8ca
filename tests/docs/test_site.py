"""The documentation builds without a broken link, and says every verb and every setting."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.recipe.layers import packaged_recipes
from browser import EXECUTABLE, browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the documentation, built strictly: a link to nowhere ends it."""
    here = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "docs", here / "docs", ignore=shutil.ignore_patterns("reference"))
    shutil.copy(ROOT / "zensical.toml", here)
    (here / "src").symlink_to(ROOT / "src")
    subprocess.run([sys.executable, ROOT / "tools/reference.py", here / "docs/reference"], check=True, timeout=300)
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return here / "site"


def test_every_page_is_in_the_navigation():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    written = {page for page in pages if not page.startswith("reference/")}
    told = set(re.findall(r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert written <= told and {page for page in told - written if not page.startswith("reference/")} == set()
    start = (ROOT / "docs/index.md").read_text()
    assert all(f"]({page})" in start for page in written if page.startswith("tutorials/"))


def test_every_setting_verb_and_recipe_has_its_place(site: Path):
    settings = (site / "reference/settings.html").read_text()
    assert "min_language_probability" in settings and "share of letters and digits" in settings
    verbs = (site / "reference/verbs.html").read_text()
    assert "affinage checkpoint verify" in verbs and "Exit status" in verbs
    recipes = (site / "reference/recipes.html").read_text()
    assert all(f'id="{name.replace(".", "")}"' in recipes for name in packaged_recipes())
    assert "rms_norm" in (site / "reference/kinds.html").read_text()


def test_docstrings_are_there_and_nothing_is_loaded_from_elsewhere(site: Path):
    assert "Union-find" in (site / "LOG.html").read_text()
    assert "refuse_changes" in (site / "reference/api/checkpoint.html").read_text()
    start = (site / "index.html").read_text()
    assert 'src="http' not in start and 'rel="stylesheet" href="http' not in start


@pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_search_works_from_a_disk_without_a_network(site: Path):
    with browser() as page:
        page.open(site / "tutorials/plan.html", 1200)
        page.wait_for("document.querySelector('.md-search__button') !== null")
        page.evaluate("document.querySelector('.md-search__button').click()")
        found = "[...document.querySelectorAll('*')].map(e => e.shadowRoot?.textContent ?? '').join('')"
        page.wait_for(f"{found} !== ''")
        page.ask("Input.insertText", text="preemption")
        page.wait_for(f"{found}.includes('results') && {found}.includes('Survive preemption')")
        assert not page.troubles and all(url.startswith(("file:", "data:")) for url in page.requests)


def test_a_link_to_nowhere_ends_the_build(site: Path):
    page = site.parent / "docs/index.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    broken = subprocess.run(command, cwd=site.parent, capture_output=True, text=True, timeout=300)
    assert broken.returncode != 0 and "page does not exist" in broken.stderr
