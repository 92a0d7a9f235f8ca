"""The page is one well-formed file that loads nothing and lets nothing from a document act on it."""

import itertools
import json
import re
import shutil
import string
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_run import HOSTILE, build_run

from affinage.report import collect_facts, render, write_report
from affinage.report.strings import LANGUAGES, strings

VOID = {"meta", "link", "br", "img", "input", "wbr", "hr"}
ALLOWED = {
    *[
        "html",
        "head",
        "meta",
        "title",
        "link",
        "style",
        "body",
        "header",
        "main",
        "section",
        "footer",
        "nav",
        "script",
        "div",
        "span",
        "p",
        "b",
        "i",
        "a",
        "code",
        "pre",
        "mark",
        "small",
    ],
    *[
        "h1",
        "h2",
        "h3",
        "ul",
        "ol",
        "li",
        "dl",
        "dt",
        "dd",
        "details",
        "summary",
        "figure",
        "figcaption",
        "table",
        "caption",
        "thead",
        "tbody",
        "tfoot",
        "tr",
        "th",
        "td",
        "wbr",
    ],
    *["svg", "path", "line", "text", "rect", "circle", "polygon"],
}


class Page(HTMLParser):
    """Checks nesting as it reads, and keeps what tests ask about."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module", params=LANGUAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = build_run(tmp_path_factory.mktemp("run"), language=request.param)
    return render(collect_facts(run))


def test_well_formed_and_in_order(page: str) -> None:
    parsed = Page(page)
    assert page.startswith("<!doctype html>")
    assert {tag for tag, _ in parsed.tags} - {"title"} <= ALLOWED
    assert len(parsed.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"] for link in parsed.all("a")} <= {f"#{one}" for one in ids}


def test_accessible(page: str) -> None:
    parsed = Page(page)
    assert len(parsed.all("caption")) == len(parsed.all("table")) > 5
    assert all("scope" in attributes for attributes in parsed.all("th"))
    assert all(svg.get("aria-hidden") == "true" or svg.get("aria-label") for svg in parsed.all("svg"))
    assert parsed.all("html")[0]["lang"] in LANGUAGES
    assert all(region.get("aria-label") for region in parsed.all("div") if region.get("role") == "region")


def test_loads_nothing(page: str) -> None:
    parsed = Page(page)
    for _, attributes in parsed.tags:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "data", "action", "poster", "background")
            assert not name.startswith("on"), "no inline handlers"
            if name == "href":
                assert value and value.startswith(("#", "data:image/svg+xml,"))
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style and "@import" not in style[1] and "url(" not in style[1]
    assert "default-src 'none'" in (parsed.all("meta")[1]["content"] or "")


def test_a_hostile_document_is_only_text(page: str) -> None:
    parsed = Page(page)
    assert len(parsed.all("script")) == 1
    assert not parsed.all("img")
    shown = "".join(parsed.texts)
    visible = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    assert shown.count(visible) >= 3  # removed document, question, answer
    assert "{{ 7 * 7 }}" in shown
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=60)
    for file in run.rglob("*.json*"):
        text = file.read_text()
        file.write_text(
            text.replace("pocket", "<img src=x onerror=alert(1)>'\\\"pocket").replace("synthetic", "<script>x")
        )
    parsed = Page(render(collect_facts(run)))
    assert not parsed.all("img")
    assert len(parsed.all("script")) == 1


def test_size_is_modest_however_long_the_run(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=30_000)
    facts = write_report(run, tmp_path / "out" / "report.html")
    size = (tmp_path / "out" / "report.html").stat().st_size
    assert facts["bytes"] == size < 1_000_000
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]


def test_facts_are_on_the_page(tmp_path: Path) -> None:
    parsed = Page(render(collect_facts(build_run(tmp_path))))
    shown = " ".join("".join(parsed.texts).replace("\u202f", " ").split())
    for expected in (
        *(
            "1,443,968",
            "13,100",
            "too short",
            "96.0 ± 1.0%",
            "+11.0 pts",
            "transformer_block",
            "4.41",
            "similarity 0.81",
        ),
        *("Resumed at step 700", "not a finite number at step 900", "61.0k of 150k tokens are trained", "97.0% of 300"),
        *(
            "What a threshold",
            "80.0% 70.0%",
            "Benchmarks looked for in the text",
            "1,234",
            "· quiz · 17",
            "42 runs of words",
        ),
        "any out for validation: notes.fr.",
        "17 have reasoning that the chat template does not write",
        *("Linear probe", "5 of each class", "88.6 ± 0.7%", "449 held-out images", "Fullest expert", "Choices dropped"),
    ):
        assert expected in shown, expected


def test_the_page_speaks_the_language_of_the_recipe(page: str) -> None:
    french = '<html lang="fr">' in page
    assert ("Préentraînement" in page) == french
    assert ("Pretraining" in page) == (not french)
    assert ("1,44\u202fM" in page) == french


def test_both_languages_fill_in_the_same_blanks() -> None:
    english, french = (strings(language) for language in LANGUAGES)
    blanks = [
        {key: {f[1] for f in string.Formatter().parse(text) if f[1]} for key, text in words.items()}
        for words in (english, french)
    ]
    assert blanks[0] == blanks[1]
    assert not set(english) & set(dir(dict)), "a template would find the method, not the words"
    assert not [text for text in french.values() if re.search(" [:;?!»]", text)]


def test_how_long_saves_stalled_a_training_is_told(page: str) -> None:
    told = " ".join("".join(Page(page).texts).split())
    if '<html lang="fr">' in page:
        assert "arrête la boucle pendant 4,18 ms en moyenne, et 56,7 ms au plus." in told
    else:
        assert "Saves: 3, for each of which the loop stood still for 4.18 ms in the mean, and for 56.7 ms" in told


def test_a_training_that_never_saved_says_nothing_of_saves(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=60)
    for name in ("pretrain", "sft"):
        summary = json.loads((run / name / "summary.json").read_text())
        never = {"count": 0, "stall_mean": 0.0, "stall_most": 0.0}
        (run / name / "summary.json").write_text(json.dumps(summary | {"saves": never}))
    assert "stood still" not in render(collect_facts(run))


def test_strings_are_all_used() -> None:
    import affinage.report

    folder = Path(affinage.report.__file__).parent
    sources = [f for f in folder.rglob("*") if f.suffix in (".py", ".j2") and f.name != "strings.py"]
    written = "\n".join(file.read_text() for file in sources)
    families = ("time_", "q_", "group_", "verdict_")
    families_at_end = ("_axis",)
    unused = [
        key
        for key in strings("en")
        if f"t.{key}" not in written
        and f'"{key}"' not in written
        and f"'{key}'" not in written
        and not key.startswith(families)
        and not key.endswith(families_at_end)
    ]
    assert unused == []


def test_preferences_are_told_in_their_own_unit(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=60)
    shutil.copytree(run / "sft", run / "dpo")
    manifest = json.loads((run / "dpo" / "manifest.json").read_text()) | {"stage": "dpo"}
    (run / "dpo" / "manifest.json").write_text(json.dumps(manifest))
    summary = json.loads((run / "dpo" / "summary.json").read_text())
    summary["validation"] = {"pairs": {"loss": 0.296, "rewards/accuracies": 0.936}}
    (run / "dpo" / "summary.json").write_text(json.dumps(summary))
    page = render(collect_facts(run))
    section = page[page.index('<section id="dpo"') : page.index('<section id="compression"')]
    assert "nats per pair" in section and "nats per token" not in section
    assert "Pairs told right" in section and "93.6%" in section
    assert "fine-tuned on conversations and taught preferences in" in page
