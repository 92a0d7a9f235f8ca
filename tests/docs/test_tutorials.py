"""Every tutorial is carried out as it is written, and says what it promises to say."""

from pathlib import Path

import pytest
from tutorial_blocks import blocks, carry_out, compare

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
# Blocks that need hardware or a network that the tests have not: this many, and no more by accident.
NOT_RUN = {"chat-model": 0, "french": 1, "plan": 1}


def test_all_tutorials_are_carried_out():
    assert {page.stem for page in PAGES.glob("*.md")} == set(NOT_RUN)
    assert all(any(block.language == "bash" and not block.skipped for block in blocks(p)) for p in PAGES.glob("*.md"))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_a_reader_gets_what_the_tutorial_promises(name: str, tmp_path: Path, warm_python: list[str]):
    assert len(carry_out(PAGES / f"{name}.md", tmp_path, warm_python)) == NOT_RUN[name]


def test_a_promise_that_is_not_kept_is_told():
    compare("pretrain: step 20/20 ... ETA\n...\ndone 1.5 s", "pretrain: step 40/40  loss 1.2  ETA\n\nx\ndone  27 s\n")
    for promised, said, missed in (("pretrain\ndone", "done\npretrain\n", "done"), ("loss 3", "loss: 3\n", "loss")):
        with pytest.raises(AssertionError, match=f"promised: {missed}"):
            compare(promised, said)


def test_what_is_not_run_is_marked(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text('<!-- not run: a TPU -->\n```bash\nfalse\n```\n```yaml title="a/b"\nx: 1\n```\n')
    assert carry_out(page, tmp_path) == ["a TPU"] and (tmp_path / "a/b").read_text() == "x: 1\n"
    page.write_text("```bash\nfalse | true\n```\n")
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError):
        carry_out(page, tmp_path / "again")
