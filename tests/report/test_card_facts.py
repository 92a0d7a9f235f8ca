"""What a model card says of the run: a licence for each source, however the recipe names it."""

import json

from affinage.report import collect_facts
from affinage.report.card import card_facts


def test_a_source_without_a_name_has_its_licence(tmp_path):
    sources = [
        {"path": "books/novels.jsonl", "licence": "cc0-1.0"},
        {"path": "other/novels.txt", "licence": "cc-by-4.0"},
        {"path": "web/", "name": "pages", "licence": "odc-by"},
        {"path": "of another version", "unknown": 1, "name": "old", "licence": "mit"},
    ]
    names = ("novels", "novels-2", "pages", "old")
    summary = {"by_source": {name: {"documents": 1, "bytes": 10 - k} for k, name in enumerate(names)}}
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "manifest.json").write_text(json.dumps({"stage": "split", "summary": summary}))
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "x", "data": {"sources": sources}}))
    told = card_facts(collect_facts(tmp_path), "mit").sources
    assert [(one["name"], one["licence"]) for one in told] == list(
        zip(names, ("cc0-1.0", "cc-by-4.0", "odc-by", "mit"))
    )


def test_the_languages_are_those_of_the_text(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "x", "data": {"languages": ["en", "fr"]}}))
    assert card_facts(collect_facts(tmp_path), "mit").languages == ("en", "fr"), "until somebody has looked"
    shares = {"fr": 5000, "de": 900, "code": 3000, "und": 700, "en": 3}
    summary = {"by_language": {name: {"documents": 1, "bytes": size} for name, size in shares.items()}}
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "manifest.json").write_text(json.dumps({"stage": "split", "summary": summary}))
    assert card_facts(collect_facts(tmp_path), "mit").languages == ("de", "fr"), "3 of 9,603 bytes are a mistake"
