"""The page is one well-formed file that loads nothing, lets nothing from a document act on it, and holds the facts."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from html_page import Page
from synthetic_run import HOSTILE, build_run, change

from affinage.config.yaml import brief
from affinage.report import collect_facts, render, write_report
from affinage.report import page as pages_of
from affinage.report.language import LANGUAGES
from affinage.report.page import Entrant, comparison, differing_settings, render_comparison, summary, write_page
from run_affinage import refused
from source_forms import write_lines

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


def test_nothing_is_loaded_and_a_hostile_document_is_only_text(page: str):
    parsed = Page(page)
    assert REACHING_OUT.isdisjoint({tag for tag, _ in parsed.tags})
    for name, value in (each for _, attributes in parsed.tags for each in attributes.items()):
        assert name not in ("src", "srcset", "data", "action", "poster", "background")
        assert not name.startswith("on"), "no inline handlers"
        assert name != "href" or (value and value.startswith(("#", "data:image/svg+xml,")))
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style and "@import" not in style[1] and "url(" not in style[1]
    assert "default-src 'none'" in (parsed.all("meta")[1]["content"] or "")
    assert len(parsed.all("script")) == 1
    visible = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    assert "".join(parsed.texts).count(visible) >= 3  # removed document, question, answer
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page)


def test_hostile_names_are_only_text(run: Path):
    for file in run.rglob("*.json*"):
        text = file.read_text().replace("pocket", "<img src=x onerror=alert(1)>'\\\"pocket")
        file.write_text(text.replace("synthetic", "<script>x"))
    parsed = Page(render(collect_facts(run)))
    assert not parsed.all("img") and len(parsed.all("script")) == 1


@pytest.mark.parametrize(("wrong", "bold"), [(2, False), (20, True)])
def test_a_change_is_that_of_the_same_items_and_bold_only_beyond_chance(run: Path, wrong: int, bold: bool):
    for model in ("base", "sft"):
        lines = [{"hash": f"h{item}", "acc": float(model == "base" or item >= wrong)} for item in range(200)]
        write_lines(run / f"evaluate-{model}" / "items" / "pocket_facts_en.jsonl", lines)
    page = render(collect_facts(run))
    found = re.search(r'facts_<wbr>en</th><td><code>acc</code></td>.*?<td class="n( strong)?">(−[\d.]+)', page)
    assert found is not None and (bool(found[1]), float(found[2].replace("−", "-"))) == (bold, -wrong / 2)


def test_a_training_without_an_end_has_its_curve_and_how_far_it_is(run: Path):
    for file in ("manifest.json", "result.json"):
        (run / "pretrain" / file).unlink()
    (run / "pretrain" / "feed.json").write_text('{"steps": 9000}')
    page = render(collect_facts(run)).replace("\u00a0", " ")
    section = page[page.index('<section id="unfinished"') :].partition("</section>")[0]
    assert "Pretraining is unfinished: step 600 of 9,000." in section and "Loss</b>" in section
    shutil.rmtree(run / "sft")
    assert summary(collect_facts(run), "en").startswith("A training that is not complete. ")
    assert '<section id="pretrain"' not in page and "inachevé, au pas" in render(collect_facts(run), "fr")


def test_size_is_modest_however_long_the_run(tmp_path: Path):
    told = write_report(build_run(tmp_path, steps=12_000), tmp_path / "out" / "report.html")
    assert told["bytes"] == (tmp_path / "out" / "report.html").stat().st_size < 1_000_000
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    assert refused(write_page, "a page", tmp_path).where == str(tmp_path)


FACTS = """1,443,968|13,100|too short|96.0 ± 1.0%|transformer_block|4.41|similarity 0.81|Resumed at step 250
61.0k of 150k tokens are trained|Benchmarks searched for in the text|1,234|· quiz · 17|any out for validation: notes.fr.
17 have reasoning that the chat template does not write|Fullest expert|Dropped choices
loss on pocket-world.fr has risen from 0.910 at step 500 to 1.02 at step 600"""


def test_facts_are_on_the_page(pages: dict[str, str], facts):
    shown = Page(pages["en"]).shown
    assert not [expected for line in FACTS.splitlines() for expected in line.split("|") if expected not in shown]
    assert all(summary(facts, language) in pages[language] for language in LANGUAGES)


def test_preferences_are_told_in_their_own_unit_and_items_in_the_training_text_are_listed(run: Path):
    with change(run / "evaluate-sft" / "results.json") as results:
        task, entry = next(iter(results["tasks"].items()))
        seen = {"items": 9, "found": [3], "common": [5], "without": entry["metrics"]}
        results["contamination"] = {"texts": 7, "ngram": 13, "tasks": {task: seen}}
    shutil.copytree(run / "sft", run / "dpo")
    with change(run / "dpo" / "manifest.json") as manifest, change(run / "dpo" / "result.json") as summary:
        manifest["step"] = "dpo"
        summary["validation"] = {"pairs": {"loss": 0.296, "rewards/accuracies": 0.936}}
    page = render(collect_facts(run))
    section = page[page.index('<section id="dpo"') : page.index('<section id="scores"')]
    assert "nats per pair" in section and "nats per token" not in section and "93.6%" in section
    assert "3; in many texts each: 5" in Page(page).shown


def test_watched_scores_stand_under_the_loss_and_what_is_worse_is_marked(run: Path):
    """Of a fine-tuning whose loss falls while a benchmark does not."""
    shares = {0: 0.62, 100: 0.60, 200: 0.55, 300: 0.44}
    scores = {step: {"winogrande": {"value": share, "stderr": 0.035}} for step, share in shares.items()}
    looks = [{"step": step, "scores": scores[step], "worse": []} for step in shares]
    looks[-1]["worse"] = [{"task": "winogrande", "than": 0, "p": 1e-4}]
    (run / "sft" / "monitor.json").write_text(json.dumps({"threshold": 1e-3, "points": looks}))
    with change(run / "sft" / "result.json") as summary:
        summary |= {"ended": "monitor", "steps": 300}
    page = render(collect_facts(run))
    section = page[page.index('id="sft"') :]
    head, told = section.index("Benchmarks during training"), section.index("The training ended at step 300, because")
    assert section.index("Loss") < head < told < section.index("Learning rate"), "benchmarks stand under the loss"
    assert section.count("M7.071,0A7.071") == 2 and "Ringed: worse" in section  # the same point, wide and narrow
    rows = re.findall(r'<th scope="row" class="n">([\d,]+)</th><td class="n( strong)?">([\d.]+)', section)
    shown = {int(step.replace(",", "")): (bool(bold), float(share)) for step, bold, share in rows}
    assert all(shown[step] == (step == 300, pytest.approx(100 * share)) for step, share in shares.items())


# ---- the verb


def test_one_line_and_the_file_and_a_french_one_beside_it(run: Path, monkeypatch, affinage, answer):
    monkeypatch.chdir(run.parent)
    words = ("report", "synthetic", "--runs", ".")
    status, out, _ = affinage(*words)
    line, place = out.splitlines()
    page = (run / "report.html").read_text()
    assert status == 0 and line.startswith("A model of 1.44M parameters") and line in page
    assert "synthetic/report.html" in place
    told = answer(*words, "--lang", "fr", "--out", "ici/rapport.html")
    french = (run.parent / "ici/rapport.html").read_text()
    assert told["language"] == "fr" and told["report"] == "ici/rapport.html"
    assert told["bytes"] == len(french.encode()) and told["summary"] in french and '<html lang="fr">' in french
    assert (run / "report.html").read_text() == page


# ---- the page of several runs beside each other


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, of which `bare` has no answers; `wide` is right where `small` is wrong, and twice as often again."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("small", 60), ("wide", 120), ("bare", 60)):
        run = build_run(folder, steps=steps, name=name)
        with change(run / "recipe.json") as settings, change(run / "evaluate-sft" / "results.json") as results:
            pretrain = {"steps": steps, "optimizer": {"name": "adamw"}, "eval_sequences": 42}  # rows: 41 and 44
            settings |= {"pretrain": pretrain, "description": f"this is {name}"}
            results["tasks"]["quiz"] = {"chat_template": name == "wide", "num_fewshot": steps // 60, "metrics": {}}
        (run / "pretrain/feed.json").write_text('{"rows": "tokenize"}')
        with change(run / "tokenize/result.json") as rows, change(run / "tokenize/manifest.json") as made:
            rows["validation"]["pocket-world.en"]["documents"] += name == "wide"
            made["files"] = {f"validation/pocket-world.{a}/tokens-0.npy": {"sha256": name} for a in ("en", "fr")}
        if name != "bare":
            quiz = [{"prompt_hash": name, "hash": n, "acc": float((n % 4 < 1) == (name == "small"))} for n in range(40)]
            write_lines(run / "evaluate-sft" / "items" / "quiz.jsonl", quiz)
    return folder


def test_only_what_differs_is_listed_by_its_key_and_in_short():
    ours = {"name": "a", "x": {"y": 1, "z": [1, 2]}, "report": {"language": "en"}, "none": None}
    theirs = {"name": "b", "x": {"y": 2, "z": [1, 2]}, "report": {"language": "fr"}, "more": {}, "none": None}
    assert differing_settings([ours, theirs]) == {"x.y": (1, 2), "more": (None, {})}
    ours, theirs = {"data": [{"path": "a"}], "sft": {"steps": 9, "root": ""}}, {"data": [{"path": "c"}], "sft": None}
    assert differing_settings([ours, theirs]) == {"data.0.path": ("a", "c"), "sft": ({"steps": 9, "root": ""}, None)}
    assert len(brief({"tasks": ["a long name of a task"] * 9})) == 60


def test_the_page_says_what_the_runs_say_in_both_languages(runs: Path):
    names = "small", "wide"
    found = comparison([Entrant(name, collect_facts(runs / name), runs / name / "evaluate-sft") for name in names])
    page = Page(render_comparison(found))
    for expected in ("pretrain.steps", "60", "120", "quiz", "25.0%", "75.0%", "+50.0 pts", "1,443,968", "Loss: Pre"):
        assert expected in page.shown, expected
    assert "this is wide" not in page.shown, "a description is no setting that matters"
    sections = {"#runs", "#differing", "#losses", "#judged", "#differences"}
    assert {link["href"] for link in page.all("a")} == sections
    assert "held-out text of pocket-world.en, pocket-world.fr:" in page.shown
    french = Page(render_comparison(found, "fr"))
    assert "mis de côté de pocket-world.en" in french.shown and "held-out" not in french.shown
    assert "Réglages qui diffèrent" in french.shown and "75,0 %" in french.shown and "Settings" not in french.shown


def test_three_runs_of_which_one_has_no_answers(runs: Path, tmp_path: Path, answer, affinage):
    told = answer("compare", "small", "wide", "bare", "--runs", str(runs), "--html", str(tmp_path / "c.html"))
    assert [run["name"] for run in told["runs"]] == ["small", "wide", "bare"]
    assert told["settings"] == [{"key": "pretrain.steps", "values": [60, 120, 60]}]
    for task, found in json.loads((runs / "small/evaluate-sft/results.json").read_text())["tasks"].items():
        for name, one in found["metrics"].items():
            assert told["runs"][0]["scores"][task][name]["value"] == one["value"]
    (difference,) = told["differences"]
    assert (difference["from"], difference["to"], difference["difference"]) == ("small", "wide", 0.5)
    assert difference["low"] > 0, "the paired test finds it real"
    assert "quiz (asked in the chat template: wide; examples before a question: 1, 2; items" in told["notes"][1]
    assert "text of pocket-world.en, pocket-world.fr:" in told["notes"][0], "of all runs, and below of those named"
    (note,) = pages_of.losses_notes([runs / "small", runs / "bare"])
    assert "text of pocket-world.fr:" in note and not pages_of.losses_notes([runs / "small"] * 2)
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    table = [line.split() for line in affinage("compare", "small", "wide", "--runs", str(runs))[1].splitlines()]
    assert ["setting", "small", "wide"] in table and ["pretrain.steps", "60", "120"] in table
