"""The recipe of Julian's text, on small stand-ins of its sources: each in the form in which it is published."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from affinage.cli.program import main
from affinage.data.collect import collect
from affinage.data.documents import read_documents
from affinage.data.special_tokens import CODE, ENDCODE, EOS
from affinage.recipe.load import load_recipe
from source_forms import book, dump_streams, page, prose

COUNTS = {
    "wikipedia-en": 30,
    "wikipedia-fr": 20,
    "oscar-en": 40,
    "oscar-fr": 36,
    "fineweb-edu": 50,
    "gutenberg-en": 4 * 3,  # chapters
    "gutenberg-fr": 3 * 3,
    "the-stack": 15,
}


def function(number: int) -> str:
    return "".join(
        f"def area_{number}_{k}(width, height):\n    if width < {k}:\n        return None\n    return width * {k}\n\n"
        for k in range(5)
    )


def texts(language: str, first: int, count: int) -> list[str]:
    return [prose(language, first + i, 8) for i in range(count)]


def write_table(folder, columns):
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "train-00000-of-00001.parquet")


def write_oscar(folder, language, found):
    folder.mkdir()
    lines = [
        {
            "content": text,
            "warc_headers": {
                "warc-record-id": f"<{language}{i}>",
                "warc-target-uri": f"https://x.example/{language}/{i}",
            },
            "metadata": {"identification": {"label": language, "prob": 0.9}},
        }
        for i, text in enumerate(found)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / f"{language}_meta_part_1.jsonl.zst").write_bytes(zstandard.compress(content))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A copy of every source: a dump, Parquet, JSON lines, as the recipe's own places hold them."""
    root = tmp_path_factory.mktemp("mirror")
    (root / "wikipedia-en").mkdir()
    articles = [page(i, f"Article {i}", f"'''{text}'''<ref>x</ref>") for i, text in enumerate(texts("en", 0, 30))]
    streams = dump_streams("en", [articles[:16], articles[16:]])
    (root / "wikipedia-en" / "enwiki-multistream.xml.bz2").write_bytes(b"".join(streams))
    french = texts("fr", 0, 20)
    urls = [f"https://fr.wikipedia.org/wiki/{i}" for i in range(20)]
    write_table(root / "wikipedia-fr", {"id": [str(i) for i in range(20)], "url": urls, "text": french})
    write_oscar(root / "oscar-en", "en", texts("en", 100, 40))
    write_oscar(root / "oscar-fr", "fr", texts("fr", 100, 36))
    web = texts("en", 200, 50)
    ids, addresses = [f"<urn:{i}>" for i in range(50)], [f"https://e.example/{i}" for i in range(50)]
    write_table(root / "fineweb-edu", {"text": web, "id": ids, "url": addresses, "score": [3.5] * 50})
    for language, name, count in (("en", "English", 4), ("fr", "French", 3)):
        books = [book(100 * count + i, name) for i in range(count)]
        write_table(root / f"gutenberg-{language}", {"id": [f"{i}-0" for i in range(count)], "text": books})
    code = {
        "content": [function(i) for i in range(15)],
        "hexsha": [f"{i:040x}" for i in range(15)],
        "lang": ["Python"] * 15,
        "max_stars_repo_name": ["a/b"] * 15,
        "max_stars_repo_head_hexsha": ["f00"] * 15,
        "max_stars_repo_path": [f"{i}.py" for i in range(15)],
        "max_stars_repo_licenses": [["MIT"]] * 15,
    }
    write_table(root / "the-stack", code)
    return root


def collected(mirror, folder, **changed):
    recipe = load_recipe("julian-data", [f"data.mirror={mirror}"]).recipe
    summary = collect(recipe.data.model_copy(update=changed), folder)
    return summary, [row for batch in read_documents(folder) for row in batch.to_pylist()]


def test_every_source_is_read_in_its_own_form(mirror, tmp_path):
    summary, rows = collected(mirror, tmp_path / "all")
    found = {name: counts["documents"] for name, counts in summary["by_source"].items()}
    front = {"gutenberg-en": 4, "gutenberg-fr": 3}  # title pages, a document each until they are cleaned away
    assert found == {name: count + front.get(name, 0) for name, count in COUNTS.items()}
    assert all(row["url"] and row["licence"] for row in rows), "where a document comes from is known of each"
    assert {row["language"].rstrip("?") for row in rows if row["source"] != "the-stack"} == {"en", "fr"}
    assert len({(row["source"], row["id"]) for row in rows}) == len(rows)


@pytest.mark.full
def test_the_whole_road_of_the_data(mirror, tmp_path):
    settings = {
        "data.mirror": mirror,
        "data.split.group_separator": "'#'",
        "tokenizer.vocabulary": 400,
        "rows.context": 64,
        "data.deduplicate": "null",  # the stand-ins repeat themselves
        "data.split.max_similarity": 0,
    }
    asked = [f"--set={key}={value}" for key, value in settings.items()]
    with pytest.raises(SystemExit) as ended:
        main(["data", "julian-data", "--runs", str(tmp_path), *asked])
    assert not ended.value.code
    run = tmp_path / "julian-data"
    summary = json.loads((run / "rows" / "manifest.json").read_text())["summary"]
    split = json.loads((run / "split" / "manifest.json").read_text())["summary"]
    for name, count in COUNTS.items():
        language = {"the-stack": "code"}.get(name, "fr" if name.endswith("fr") else "en")
        held_out = split["validation"].get(f"{name}.{language}", {"documents": 0})["documents"]
        assert split["by_source"][name]["documents"] + held_out == count
    assert summary["shards"] <= 359
    (stack,) = (run / "rows" / "train").glob("the-stack*")
    tokens = np.concatenate([np.load(file).ravel() for file in sorted(stack.glob("rows-*.npy"))])
    documents = split["by_source"]["the-stack"]["documents"]
    assert [(tokens == control).sum() for control in (CODE, ENDCODE, EOS)] == [documents] * 3
    (oscar,) = (run / "rows" / "train").glob("oscar-fr*")
    assert not np.isin(np.load(next(iter(oscar.glob("rows-*.npy")))), [CODE, ENDCODE]).any()


def test_without_a_network_or_a_mirror_it_is_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "julian-data", "--dry-run", "--runs", str(tmp_path), "--set", f"data.mirror={tmp_path}"])
    told = capsys.readouterr()
    assert ended.value.code == 2 and "would run" not in told.out
    assert "wikipedia-en" in told.err and "julian-data.yaml" in told.err
