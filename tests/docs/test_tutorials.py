"""Every tutorial is carried out as it is written, and says what it promises to say."""

from pathlib import Path

import pytest
from tutorial_blocks import blocks, carry_out

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
# Blocks that need hardware or a network that the tests have not: this many, and no more by accident.
NOT_RUN = {"chat-model": 0, "french": 1, "plan": 1}


def test_all_tutorials_are_carried_out():
    assert {page.stem for page in PAGES.glob("*.md")} == set(NOT_RUN)
    assert all(any(block.language == "bash" and not block.skipped for block in blocks(p)) for p in PAGES.glob("*.md"))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_a_reader_gets_what_the_tutorial_promises(name: str, tmp_path: Path):
    assert len(carry_out(PAGES / f"{name}.md", tmp_path)) == NOT_RUN[name]
