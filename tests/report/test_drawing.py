"""Charts put points where their values say; scales, curves and numbers are what readers expect."""

import math
import re
import string
from pathlib import Path
from xml.etree import ElementTree

import pytest
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po
from html_page import Page, plain

from affinage.data import readers
from affinage.report import language
from affinage.report.figures import Axis, Bar, Series, line_figure, row_chart
from affinage.report.language import Language
from affinage.report.page import summary

EN, FR = Language("en"), Language("fr")
SHARE = Axis("score", ".0%")
near = pytest.approx


def drawn(drawing: str, width: str = "wide") -> ElementTree.Element:
    """The picture for wide or for narrow pages."""
    (one,) = [each for each in ElementTree.fromstring(f"<p>{drawing}</p>") if each.get("class") == width]
    return one[0]


def placed(element: ElementTree.Element) -> tuple[float, float]:
    return tuple(map(float, re.findall(r"-?[\d.]+", element.get("transform") or "")[:2]))  # type: ignore[return-value]


def lines(picture: ElementTree.Element, color: str) -> list[list[float]]:
    """From where to where the horizontal lines of a color go."""
    found = [one for one in picture.iter() if one.tag.endswith("line") and one.get("stroke") == color]
    ends = [(placed(one)[0], placed(one)[0] + float(one.get("x2") or 0)) for one in found if one.get("x2") != "0"]
    return [sorted(pair) for pair in ends]


@pytest.mark.parametrize("log", [False, True])
def test_every_point_is_inside_and_higher_values_are_higher(log: bool):
    points = [(float(i + 1), 0.1 + (7.3 * i) % 11) for i in range(30)]
    figure = line_figure("a chart", [Series("loss", points)], "step", Axis("loss", "~g", log), EN)
    for width in ("wide", "narrow"):
        blue = [one for one in drawn(figure.drawing, width).iter() if one.get("stroke") == "var(--s0)"]
        path = max((one.get("d") or "" for one in blue), key=len)
        corners = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path)[1:]]
        assert len(corners) == len(points) and all(-1 <= x <= 920 and -1 <= y <= 340 for x, y in corners)
        assert [x for x, _ in corners] == sorted(x for x, _ in corners)
        heights = [corners[i][1] for i in sorted(range(len(points)), key=lambda i: points[i][1])]
        assert heights == sorted(heights, reverse=True)  # pixels grow downwards


def test_error_bars_reach_one_standard_error_each_way_and_end_with_the_axis():
    picture = drawn(row_chart([Bar("task", 0.5, 0.1, 0), Bar("task", 0.9, 0.2, 1)], {"task": 0.25}, SHARE, "s", EN))
    (half,) = [one for one in picture.iter() if one.get("d") and one.get("stroke") == "var(--s0)"]  # the point at 0.5
    inner = 2 * placed(half)[0]
    assert [end / inner for end in lines(picture, "var(--s0)")[0]] == near([0.4, 0.6], abs=1e-3)
    assert [end / inner for end in lines(picture, "var(--s1)")[0]] == near([0.7, 1.0], abs=1e-3)


@pytest.mark.parametrize(("write", "value", "english", "french"), [
    ("count", 1443968, "1,443,968", "1 443 968"), ("short", 1443968, "1.44M", "1,44 M"),
    ("short", 39.3e9, "39.3B", "39,3 Md"), ("bytes", 3_050_000, "3.05 MB", "3,05 Mo"),
    ("flops", 1.4e20, "140 EFLOP", "140 EFLOP"), ("duration", 0.0008, "0.8 ms", "0,8 ms"),
    ("duration", 3599.9, "1 h 00 min", "1 h 00 min"), ("duration", 21 * 86400 + 7200, "21 d 2 h", "21 j 2 h"),
    ("percent", 0.971, "97.1%", "97,1 %"), ("number", 0.00012, "1.2 × 10⁻⁴", "1,2 × 10⁻⁴"),
])  # fmt: skip
def test_numbers_are_written_as_readers_of_each_language_expect(write, value, english, french):
    assert (plain(getattr(EN, write)(value)), plain(getattr(FR, write)(value))) == (english, french)
    assert [getattr(EN, write)(each) for each in (None, math.nan, math.inf)] == ["–"] * 3


def test_an_axis_writes_a_prefix_from_a_thousand_on_and_none_below_one():
    for top, expected in ((250_000.0, {"0", "100k", "250k"}), (0.65, {"0", "0,1", "0,6"})):
        picture = drawn(line_figure("", [Series("", [(0, 0.0), (2000, top)])], "pas", Axis("y"), FR).drawing)
        written = {one.text for one in picture.iter() if one.text and one.tag.endswith("text")}
        assert expected | {"1k", "2k"} <= written and not written & {"0k", "0m", "100m"}


PACKAGE = Path(language.__file__).parent
ENGLISH = r"\b(the|of|and|with|is|are|was|were|from|that|this|which|per|by|for|in)\b"


def catalogue(context: str | None) -> dict[str, str]:
    """The French messages of the report."""
    with (PACKAGE / "locale" / "fr.po").open("rb") as file:
        found = [one for one in read_po(file) if one.id and one.context == context]
    pairs = [(one.id, one.string) if isinstance(one.id, str) else (one.id[0], one.string[-1]) for one in found]
    return {str(english): str(french) for english, french in pairs}  # of one with a plural, that


def extracted() -> set[str]:
    """All messages in the templates and the code."""
    methods = [("**.py", "python"), ("**.j2", "jinja2")]
    found = extract_from_dir(PACKAGE, method_map=methods, keywords={"t": None, "N_": None})
    return {message for _, _, message, _, _ in found}


def test_no_english_is_left_on_the_page_and_numbers_are_french(pages: dict[str, str], facts):
    ours = Page(pages["fr"]).own
    assert len(ours) > 200, "the page was read"
    assert [text for text in ours if re.search(ENGLISH, text)] == []
    whole = {text for text in extracted() if " " in text and "{" not in text} - set(catalogue(None).values())
    assert whole.isdisjoint(ours) and '<html lang="fr">' in pages["fr"]
    shown = " ".join(ours)
    assert not re.search(r"(?<![\w-])\d+\.\d", shown), "a decimal point that is not of a name"
    assert not re.search(r"\d%", shown), "no space before a percent sign"
    assert summary(facts, "fr").startswith("Un modèle de 1,44\u202fM paramètres, préentraîné sur")


def test_every_message_and_reason_has_its_french_with_the_same_blanks_and_no_french_is_left_over():
    french = catalogue(None)
    assert extracted() == set(french)
    # Words that are the same in both languages, looked at one by one.
    assert {text for text in french if text == french[text]} <= {
        "Sources", "Source", "Documents", "Tokens", "Total", "Scores", "pts", "base", "Part", "Versions", "tokens",
        "{count} tokens", "validation", "compilation",
    }  # fmt: skip
    for english, text in french.items():
        assert {f[1] for f in string.Formatter().parse(english)} == {f[1] for f in string.Formatter().parse(text)}
        assert not re.search(" [:;?!»]", text), text
    reasons = {"no text key", "too large", readers.UNKNOWN_KIND, "empty", "not UTF-8", "not JSON", "in a benchmark"}
    assert not reasons - set(catalogue("reason"))
    assert FR.reason("too short") == "trop court"
    assert FR.reason(plug := "whatever a plug-in writes") == FR.detail(plug) == plug
    one, two = (FR("{count} removed: why, with examples", count, count=count) for count in (1, 2))
    assert plain(one).startswith("1 retiré :") and plain(two).startswith("2 retirés :")
    for detail, expected in (("Jaccard 0.853 to a-1.5 of b", "Jaccard 0,853 avec a-1.5 de b"), ("en 1.00", "en 1,00")):
        assert (FR.detail(detail), EN.detail(detail)) == (expected, detail)
    steps = "".join(file.read_text() for file in Path(readers.__file__).parent.glob("*.py"))
    written = [max(re.split(r"\{\w+\}", message), key=len) for message in language.DETAILS]
    assert not [words for words in written if words not in steps], "no step writes it any more"
