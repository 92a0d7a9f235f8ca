"""Writes the pocket world to a folder."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from affinage.data.world.agreement import scenes
from affinage.data.world.arithmetic import calculations
from affinage.data.world.chats import conversations, exchanges, preferences
from affinage.data.world.documents import Document, Teller, ordinary_documents
from affinage.data.world.facts import LANGUAGES, Fact, build_facts
from affinage.data.world.junk import planted_documents
from affinage.data.world.tasks import build_tasks, write_tasks

SHARDS = 4  # files that the documents are spread over
_ORDINARY = 0.96  # of the bytes; the rest is planted


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return len(text.encode())


def _fact_record(fact: Fact) -> dict[str, Any]:
    return {
        "id": fact.id,
        "relation": fact.relation,
        "domain": fact.domain,
        "subject": {language: fact.forms[language]["s"] for language in LANGUAGES},
        "object": fact.object,
        "object_names": {language: fact.forms[language]["o"] for language in LANGUAGES},
        "forms": fact.forms,
        "plural": fact.plural,
        "also_true": sorted(fact.also_true),
        "stated": list(fact.stated),
        "used": fact.used,
        "held_out": fact.held_out,
    }


def _all_documents(facts: list[Fact], megabytes: float, seed: int) -> list[Document]:
    told_sums, _ = calculations(seed)
    told_scenes, _ = scenes(seed)
    tellers = [
        Teller(facts, told_sums, told_scenes, language, random.Random(f"{seed}/documents/{language}"))
        for language in LANGUAGES
    ]
    ordinary = list(ordinary_documents(tellers, round(_ORDINARY * megabytes * 1e6)))
    rng = random.Random(f"{seed}/planted")
    documents = ordinary + planted_documents(ordinary, rng)
    rng.shuffle(documents)
    return documents


def write_world(folder: Path | str, *, megabytes: float = 3.0, seed: int = 0) -> dict[str, Any]:
    """Write documents, chats, preference pairs, benchmark tasks and the facts themselves into a folder.

    `megabytes` (1e6 bytes of UTF-8) is the volume of the documents' text; everything else has a fixed size. The same
    arguments write the same bytes. Returns counts by kind, relation and language, and the bytes written.
    """
    folder = Path(folder)
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    facts = build_facts(seed)
    documents = _all_documents(facts, megabytes, seed)
    size = -(-len(documents) // SHARDS)
    for shard in range(SHARDS):
        lines = (document.to_dict() for document in documents[shard * size : (shard + 1) * size])
        _write_lines(folder / "documents" / f"part-{shard}.jsonl", lines)
    told_sums, held_out_sums = calculations(seed)
    asked = exchanges(facts, told_sums, random.Random(f"{seed}/chats"))
    chats = conversations(asked, random.Random(f"{seed}/talks"))
    pairs = preferences(asked, facts, random.Random(f"{seed}/preferences"))
    tasks = build_tasks(facts, held_out_sums, scenes(seed)[1], asked, seed)
    _write_lines(folder / "chat.jsonl", chats)
    _write_lines(folder / "preferences.jsonl", pairs)
    write_tasks(tasks, folder / "tasks")
    records = json.dumps([_fact_record(fact) for fact in facts], ensure_ascii=False, indent=1)
    (folder / "facts.json").write_text(records + "\n", encoding="utf-8")
    return {
        "documents": len(documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "by_kind": dict(sorted(Counter(document.kind for document in documents).items())),
        "by_language": dict(sorted(Counter(document.lang for document in documents).items())),
        "facts": len(facts),
        "by_relation": dict(sorted(Counter(fact.relation for fact in facts).items())),
        "facts_stated": dict(sorted(Counter("+".join(fact.stated) for fact in facts).items())),
        "calculations_held_out": len(held_out_sums),
        "conversations": len(chats),
        "preferences": len(pairs),
        "tasks": {name: len(items) for name, items in sorted(tasks.items())},
    }
