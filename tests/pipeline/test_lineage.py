"""The way from a step to its documents and back, against a walk over all steps, and what the verbs print of it."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import run_affinage
import tiny_run
from affinage.data.special_tokens import BOS
from affinage.pipeline.lineage import TrainingRows
from source_forms import rows_of, write_lines
from tiny_corpus import write_split

STEPS, BATCH = 160, 4
SECRET = "the cheese cellar of Aurillac"
SETTINGS = ["name=cellar", "seed=3", "sft=null", "tokenizer={kind: char}", "data.split.validation_fraction=0.1"]
SETTINGS += ["data={filters: {language_threshold: 0, min_characters: 10, min_alnum_ratio: 0}, dedup: null}"]
SETTINGS += [f"pretrain={{steps: {STEPS}, batch_size: {BATCH}}}"]
SETTINGS += ["pretrain.mixture=[{weights: {tales: 1, fr: 1}}, {from_step: 40, weights: {tales: 3, code: 1}}]"]


@pytest.fixture(scope="module", params=["concat", "best_fit"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, texts = tmp_path_factory.mktemp("cellar"), defaultdict(list)
    for document in rows_of(write_split(folder / "words", train=60) / "train"):
        texts[document["language"]].append(document["text"] * (1 + len(texts["en"]) % 3))
    texts["en"][5] += f" It lay in {SECRET}, and {SECRET} was cold."
    texts["en"][7] = f"{SECRET} is here too. " + texts["en"][7]
    for name, language in (("tales", "en"), ("lettres", "fr")):
        lines = [{"id": f"{name}-{i}", "text": text} for i, text in enumerate(texts[language])]
        write_lines(folder / f"{name}.jsonl", [*lines, {"id": "short", "text": "zq"}])
    program = {"id": "program", "text": f"def cellar():\n    return '{SECRET}'\n" + "# nothing else\n" * 9}
    write_lines(folder / "programs.jsonl", [program])
    kinds = {"tales": "language: en", "lettres": "language: fr", "programs": "kind: code"}
    sources = ", ".join(f"{{path: {folder}/{name}.jsonl, {kind}}}" for name, kind in kinds.items())
    settings = [*SETTINGS, f"packing.strategy={request.param}", f"data.sources=[{sources}]"]
    run_affinage.run("data", tiny_run.RECIPE, "--runs", folder / "runs", settings=settings)
    return folder / "runs" / "cellar"


@cache
def texts_of(run: Path) -> dict[tuple[str, str], str]:
    """The texts that are trained on, by source and id."""
    return {(row["source"], row["id"]): row["text"] for row in rows_of(run / "split" / "train")}


def test_where_names_the_documents_whose_text_the_batch_holds(run: Path, answer):
    texts, training = texts_of(run), TrainingRows(run, "pretrain")
    tokenizer = training.tokenizer
    for step in (1, 41, STEPS):
        batch = training.feed.batch(step - 1)
        found = answer("data", "lineage", str(run), "--step", str(step))
        assert [row["row"] for row in found["rows"]] == list(range(BATCH))
        for row in found["rows"]:
            tokens = batch["tokens"][row["row"]]
            assert row["documents"]
            for document in row["documents"]:
                piece = tokens[document["start"] : document["stop"]]
                assert (piece[0] == BOS) == (document["offset"] == 0)
                assert tokenizer.decode(piece.tolist()) in texts[document["source"], document["id"]]
        one = answer("data", "lineage", str(run), "--step", str(step), "--row", "2")
        shown = "".join(document["text"] for document in one["rows"][0]["documents"])
        assert shown == tokenizer.decode(batch["tokens"][2].tolist())


def test_find_names_exactly_the_steps_whose_rows_hold_the_text(run: Path, answer, affinage):
    training, found = TrainingRows(run, "pretrain"), answer("data", "search", str(run), SECRET)
    texts = {document["id"]: document["occurrences"] for document in found["documents"]}
    assert texts == {"tales-5": 2, "tales-7": 1, "program": 1}
    assert answer("data", "search", str(run), SECRET.swapcase())["documents"] == found["documents"]

    # By brute force: every row whose lineage has a token of the text, in every step.
    expected = defaultdict(set)
    for step in range(STEPS):
        for row in training.where(step + 1):
            for document in row["documents"]:
                for each in found["documents"]:
                    if each["id"] == document["id"] and holds(run, training, document, row):
                        expected[each["id"]].add(step + 1)
    for each in found["documents"]:
        assert {step for row in each["rows"] for step in row["steps"]} == expected[each["id"]]
        assert bool(expected[each["id"]]) == (each["part"] == "train")
    shown = affinage("data", "search", str(run), SECRET)[1].splitlines()
    for each in found["documents"]:  # a line for each row that holds it, which ends with the steps
        ends = [f" {row['number']:,} {', '.join(map(str, row['steps']))}".rstrip() for row in each["rows"]]
        ends = ends or [" held out –"]
        lines = [re.sub(" +", " ", line).rstrip() for line in shown if line.startswith(f"{each['id']} ")]
        assert len(lines) == len(ends) and all(line.endswith(end) for line, end in zip(lines, ends)), shown
    assert "There are more" in affinage("data", "search", str(run), SECRET, "--limit", "1")[1]


def holds(run: Path, training: TrainingRows, span: dict, row: dict) -> bool:
    """Whether a piece of a document has some character of the text; every character is one token here."""
    before = 2 if span["source"] == "programs" else 1  # <s>, and around a program <|code|> and <|endcode|>
    text = texts_of(run)[span["source"], span["id"]]
    inside = np.zeros(len(text) + 2 * before, bool)
    for found in re.finditer(SECRET, text):
        inside[found.start() + before : found.end() + before] = True
    return bool(inside[span["offset"] :][: span["stop"] - span["start"]].any())


def test_show_pages_through_documents(run: Path, answer):
    whole = answer("data", "head", str(run), "--limit", "1000")
    assert {document["part"] for document in whole} == {"train", "validation"}
    assert answer("data", "head", str(run), "--limit", "2") == whole[:2]
    trained = answer("data", "head", str(run), "--part", "train", "--limit", "1000")
    assert trained == [each for each in whole if each["part"] == "train"]
    kept = answer("data", "head", f"{run}/filter", "--limit", "1000")
    assert kept and "short" not in {each["id"] for each in kept}


def test_a_mistake_names_what_there_is_instead(run: Path, affinage):
    assert "nothing to look for" in affinage("data", "search", str(run), "")[2]
    (bare := run.with_name("bare")).mkdir()
    (bare / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    for words, named in (
        ("lineage RUN --step 161", "1 to 160"), ("lineage RUN --step 1 --row 4", "row 4"),
        ("lineage RUN --step 1 --training sft", "`sft`"), ("lineage nobody --step 1", "`nobody`"),
        ("head RUN/tokenize", "`tokenize`"), ("head RUN/dedup", "filter, split"), (f"head {bare}", "It has none."),
    ):  # fmt: skip
        status, _, said = affinage("data", *words.replace("RUN", str(run)).split())
        assert status == 2 and named in said, words
