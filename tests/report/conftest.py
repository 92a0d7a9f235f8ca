"""One made-up run and its two pages, made once for all tests of the report."""

import shutil

import pytest
from synthetic_run import build_run

from affinage.report import Facts, collect_facts, render


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """The run, to be read only."""
    return build_run(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def facts(made) -> Facts:
    return collect_facts(made)


@pytest.fixture(scope="session")
def pages(facts: Facts) -> dict[str, str]:
    return {language: render(facts, language) for language in ("en", "fr")}


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run for a test that changes it."""
    return shutil.copytree(made, tmp_path / "synthetic")
