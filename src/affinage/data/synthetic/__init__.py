"""The synthetic corpus ("pocket world"): true facts in English and French, from a seed, with its own benchmarks."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from affinage.data.synthetic.benchmarks import build_tasks, conversations, exchanges, preferences
from affinage.data.synthetic.documents import Writer, ordinary_documents, planted_documents
from affinage.data.synthetic.facts import LANGUAGES, build_facts, calculations, scenes, table

SHARDS = 4  # files that the documents are spread over
ORDINARY_SHARE = 0.96  # of the bytes; the rest is planted


def write_world(folder: Path | str, *, megabytes: float = 3.0, seed: int = 0) -> dict[str, Any]:
    """Write documents, chats, preference pairs, benchmark tasks and the facts themselves into a folder.

    `megabytes` (1e6 bytes of UTF-8) is the volume of the documents' text; everything else has a fixed size. The same
    arguments write the same bytes. Returns counts of what was written.
    """
    folder = Path(folder)
    facts = build_facts(seed)
    used_sums, held_out_sums = calculations(seed)
    used_scenes, held_out_scenes = scenes(seed)
    writers = [Writer(language, facts, used_sums, used_scenes, seed) for language in LANGUAGES]
    documents = ordinary_documents(writers, round(ORDINARY_SHARE * megabytes * 1e6))
    rng = random.Random(f"{seed}/planted")
    documents += planted_documents(documents, rng)
    rng.shuffle(documents)
    asked = exchanges(facts, used_sums, random.Random(f"{seed}/chats"))
    chats = conversations(asked, random.Random(f"{seed}/talks"))
    pairs = preferences(asked, facts, random.Random(f"{seed}/preferences"))
    tasks = build_tasks(facts, held_out_sums, held_out_scenes, asked, seed)

    def write(name: str, lines: Iterable[Any]) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")

    size = -(-len(documents) // SHARDS)
    for shard in range(SHARDS):
        part = documents[shard * size : (shard + 1) * size]
        write(f"documents/part-{shard}.jsonl", (document._asdict() for document in part))
    write("chat.jsonl", chats)
    write("preferences.jsonl", pairs)
    write("facts.jsonl", map(vars, facts))
    for name, items in tasks.items():
        write(f"tasks/{name}.jsonl", items)
        kind = {"agreement": "minimal_pair", "chat": "chat"}.get(name.split("_")[1], "completion")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        settings = {"task": name, **source, "test_split": "test", **table("tasks")[kind]}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (folder / f"tasks/{name}.yaml").write_text(text, "utf-8")
    return {"documents": len(documents), "tasks": {name: len(items) for name, items in sorted(tasks.items())}}
