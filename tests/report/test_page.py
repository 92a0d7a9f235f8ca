"""The page is one well-formed file that loads nothing, lets nothing from a document act on it, and holds the facts."""

import itertools
import json
import re
from pathlib import Path

import pytest
from html_page import Page

from affinage.report import collect_facts, render
from affinage.report.language import LANGUAGES

REACHING_OUT = {*"iframe object embed form input button img base video audio foreignobject".split()}


@pytest.fixture(scope="module", params=LANGUAGES)
def page(request: pytest.FixtureRequest, pages: dict[str, str]) -> str:
    return pages[request.param]


def test_well_formed_in_order_and_accessible(page: str):
    parsed = Page(page)
    assert page.startswith("<!doctype html>") and len(parsed.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and {link["href"] for link in parsed.all("a")} <= {f"#{one}" for one in ids}
    assert len(parsed.all("caption")) == len(parsed.all("table")) > 5
    assert all("scope" in attributes for attributes in parsed.all("th"))
    assert all(svg.get("aria-hidden") == "true" or svg.get("aria-label") for svg in parsed.all("svg"))
    assert all(region.get("aria-label") for region in parsed.all("div") if region.get("role") == "region")


def test_loads_nothing(page: str):
    parsed = Page(page)
    assert REACHING_OUT.isdisjoint({tag for tag, _ in parsed.tags})
    for name, value in ((name, value) for _, attributes in parsed.tags for name, value in attributes.items()):
        assert name not in ("src", "srcset", "data", "action", "poster", "background")
        assert not name.startswith("on"), "no inline handlers"
        assert name != "href" or (value and value.startswith(("#", "data:image/svg+xml,")))
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style and "@import" not in style[1] and "url(" not in style[1]
    assert "default-src 'none'" in (parsed.all("meta")[1]["content"] or "")


def test_hostile_names_are_only_text(run: Path):
    for file in run.rglob("*.json*"):
        text = file.read_text().replace("pocket", "<img src=x onerror=alert(1)>'\\\"pocket")
        file.write_text(text.replace("synthetic", "<script>x"))
    parsed = Page(render(collect_facts(run)))
    assert not parsed.all("img") and len(parsed.all("script")) == 1


@pytest.mark.parametrize(("wrong", "bold"), [(2, False), (20, True)])
def test_a_change_is_that_of_the_same_items_and_bold_only_beyond_chance(run: Path, wrong: int, bold: bool):
    for model in ("base", "sft"):
        items = run / f"evaluate-{model}" / "items"
        items.mkdir()
        lines = ({"hash": f"h{item}", "acc": float(model == "base" or item >= wrong)} for item in range(200))
        (items / "pocket_facts_en.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = render(collect_facts(run))
    found = re.search(r'facts_<wbr>en</th><td><code>acc</code></td>.*?<td class="n( strong)?">(−[\d.]+)', page)
    assert found is not None and (bool(found[1]), float(found[2].replace("−", "-"))) == (bold, -wrong / 2)
