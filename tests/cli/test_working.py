"""What is told of the time that is left."""

import pytest

from affinage.cli.working import Left, Working, share_in


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("scored 30 of 90 choices", 1 / 3),
        ("scored 1,000 of 2,000 rows", 0.5),
        ("45%", 0.45),
        ("train/en 7.5 %", 0.075),
        ("0 of 0", None),
        ("measuring bits per byte", None),
    ],
)
def test_the_share_that_words_tell(words, share):
    assert share_in(words) == (share if share is None else pytest.approx(share))


def test_what_is_left_follows_from_what_was_done():
    left = Left()
    assert left.after("0%", 100.0) is None, "nothing is done yet"
    assert left.after("10%", 101.0) is None, "too early to tell"
    assert left.after("25%", 110.0) == pytest.approx(30)
    assert left.after("50%", 120.0) == pytest.approx(20)
    assert left.after("reading", 121.0) is None
    assert left.after("1 of 10", 130.0) is None, "something new has begun"
    assert left.after("4 of 10", 136.0) == pytest.approx(12)
    assert left.after("0 of 5", 140.0) is None, "and again"


def test_it_shows_nothing_in_a_pipe(capsys):
    with Working("reading") as working:
        working.progressed("50%")
    assert capsys.readouterr() == ("", "")


def test_or_a_line_for_each_new_thing(capsys):
    with Working("reading", lines=True) as working:
        for what in ("a.txt", "10 of 90 rows", "30 of 90 rows", "the end"):
            working.progressed(what)
    assert capsys.readouterr() == ("", "reading: a.txt\nreading: 10 of 90 rows\nreading: the end\n")
