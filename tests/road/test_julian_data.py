"""The recipes of Julian, on small stand-ins of their sources: each in the form in which it is published."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from affinage.config.load import load_recipe
from affinage.data.dataloader import DataLoader
from affinage.data.ingest import ingest
from affinage.data.special_tokens import IM_END, IM_START
from affinage.data.tuning_data import prepare_tuning_data
from affinage.json_files import read_object
from source_forms import book, dump_streams, page, prose, rows_of, write_lines
from tiny_models import tokenizer

COUNTS = {"wikipedia-en": 30, "wikipedia-fr": 20, "oscar-en": 40, "oscar-fr": 36, "fineweb-edu": 50, "the-stack": 15}
BOOKS = {"gutenberg-en": 4, "gutenberg-fr": 3}
FUNCTION = "def area_{0}(width, height):\n    if width < {0}:\n        return None\n    return width * {0}\n\n"


def texts(language: str, first: int, count: int) -> list[str]:
    return [prose(language, first + i, 8) for i in range(count)]


def oscar(language: str, number: int, text: str) -> str:
    uri = f"https://x.example/{language}/{number}"
    headers = {"warc-record-id": f"<{language}{number}>", "warc-target-uri": uri}
    labels = {"identification": {"label": language, "prob": 0.9}}
    return json.dumps({"content": text, "warc_headers": headers, "metadata": labels}) + "\n"


def write_mirror(root: Path) -> None:
    """A copy of every source: a dump, Parquet, JSON lines, as the recipe's own places hold them."""
    for name in (*COUNTS, *BOOKS):
        (root / name).mkdir(parents=True)

    def write(name: str, **columns: list) -> None:
        pq.write_table(pa.table(columns), root / name / "train-00000-of-00001.parquet")

    articles = [page(i, f"Article {i}", f"'''{text}'''<ref>x</ref>") for i, text in enumerate(texts("en", 0, 30))]
    streams = dump_streams("en", [articles[:16], articles[16:]])
    (root / "wikipedia-en" / "enwiki-multistream.xml.bz2").write_bytes(b"".join(streams))
    urls = [f"https://fr.wikipedia.org/wiki/{i}" for i in range(20)]
    write("wikipedia-fr", id=[str(i) for i in range(20)], url=urls, text=texts("fr", 0, 20))
    for language, count in (("en", 40), ("fr", 36)):
        lines = "".join(oscar(language, i, text) for i, text in enumerate(texts(language, 100, count))).encode()
        (root / f"oscar-{language}" / f"{language}_meta_part_1.jsonl.zst").write_bytes(zstandard.compress(lines))
    ids, addresses = [f"<urn:{i}>" for i in range(50)], [f"https://e.example/{i}" for i in range(50)]
    write("fineweb-edu", text=texts("en", 200, 50), id=ids, url=addresses, score=[3.5] * 50)
    for (name, count), language in zip(BOOKS.items(), ("English", "French"), strict=True):
        write(name, id=[f"{i}-0" for i in range(count)], text=[book(100 * count + i, language) for i in range(count)])
    repository = {"max_stars_repo_name": "a/b", "max_stars_repo_head_hexsha": "f00", "max_stars_repo_licenses": ["MIT"]}
    code = {name: [value] * 15 for name, value in (repository | {"lang": "Python"}).items()}
    code["content"] = ["".join(FUNCTION.format(10 * i + k) for k in range(5)) for i in range(15)]
    write("the-stack", hexsha=[*map(str, range(15))], max_stars_repo_path=[f"{i}.py" for i in range(15)], **code)


def test_every_source_is_read_in_its_own_form(tmp_path: Path):
    write_mirror(tmp_path / "mirror")
    summary = ingest(load_recipe("julian-data", [f"data.mirror={tmp_path}/mirror"]).recipe.data, tmp_path / "out")
    assert {name: counts["documents"] for name, counts in summary["by_source"].items()} == COUNTS | BOOKS
    rows = rows_of(tmp_path / "out")
    assert all(row["url"] and row["license"] for row in rows), "where a document comes from is known of each"
    assert {row["language"].rstrip("?") for row in rows if row["source"] != "the-stack"} == {"en", "fr"}
    assert len({(row["source"], row["id"]) for row in rows}) == len(rows)


def test_without_a_network_or_a_mirror_it_is_refused_before_anything_runs(tmp_path: Path, affinage):
    words = ("data", "julian-data", "--dry-run", "--runs", str(tmp_path), "--set", f"data.mirror={tmp_path}")
    status, out, said = affinage(*words)
    assert status == 2 and "would run" not in out and "wikipedia-en" in said and "julian-data.yaml" in said


# ---- the recipe of Julian's assistant

TALKS = {
    "alpaca": 30, "dolly": 12, "code-alpaca": 9, "gpt4all-j": 10,
    "french": 8, "openhermes": 25, "slimorca": 15, "others": 20,
}  # fmt: skip


def item(name: str, number: int) -> dict[str, object]:
    asks, answers = f"{name} asks {number}?", f"{name} answers {number}."
    match name:
        case "alpaca" | "code-alpaca" | "french":
            return {"instruction": asks, "input": "" if number % 2 else "some text", "output": answers, "text": "x"}
        case "dolly":
            return {"instruction": asks, "context": "", "response": answers, "category": "open_qa"}
        case "gpt4all-j":
            return {"prompt": asks, "response": answers, "source": "x"}
        case "others":
            turns = [("user", asks), ("assistant", answers), ("user", "And?"), ("assistant", "That is all.")]
            return {"id": f"o{number}", "messages": [{"role": role, "content": text} for role, text in turns]}
    turns = [("system", "Be exact."), ("human", asks), ("gpt", answers)]
    return {"conversations": [{"from": role, "value": text, "weight": None} for role, text in turns]}


def test_every_source_of_the_mixture_becomes_rows(tmp_path: Path):
    for name, count in TALKS.items():
        items, folder = [item(name, number) for number in range(count)], tmp_path / "talks" / name
        folder.mkdir(parents=True)
        if name in ("dolly", "code-alpaca"):  # these two are published as JSON lines
            write_lines(folder / "data.jsonl", items)
        else:
            pq.write_table(pa.Table.from_pylist(items), folder / "train-00000-of-00001.parquet")
    overrides = [f"sft.mirror={tmp_path}/talks", "sft.seq_len=256", "sft.validation_fraction=0"]
    settings = load_recipe("julian-sft", overrides).recipe.sft
    rows = {"seq_len": 256, "system_prompt": settings.system_prompt}
    summary = prepare_tuning_data(settings, tokenizer(), tmp_path / "rows", **rows)
    train = tmp_path / "rows" / "train"
    counts = {name: read_object(train / name / "shards.json")["conversations"] for name in TALKS}
    assert counts == TALKS and summary["train"]["conversations"] == sum(TALKS.values())
    batch = DataLoader(train, seed=0, batch=summary["train"]["rows"]).batch(0)
    # Trained is what the assistant says, to the end of its message.
    for tokens, mask in zip(batch["tokens"], batch["loss_mask"].astype(bool)):
        text = tokenizer().decode(tokens[mask], keep_special=True)
        assert " answers " in text and " asks " not in text and "Be exact" not in text
        assert tokens[mask][-1] == IM_END and IM_START not in tokens[mask]
