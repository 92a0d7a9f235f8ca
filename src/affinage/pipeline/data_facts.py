"""What the data of a run are, in numbers: documents, bytes, rows, tokens, epochs, and how the tokenizer spells them."""

from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.pipeline.lineage import DOCUMENT_STAGES, TrainingRows
from affinage.pipeline.store import read_manifest

_FUNNEL = ("documents_in", "documents_out", "bytes_in", "bytes_out", "removed", "by_source", "by_language")


def data_facts(run: Path) -> dict[str, Any]:
    """Counts of a run's data stages: {stages, rows, validation, tokenizer, training}; those that are there."""
    summaries = {
        stage: manifest["summary"]
        for stage in (*DOCUMENT_STAGES, "train-tokenizer", "tokenize")
        if (manifest := read_manifest(run / stage)) is not None
    }
    facts: dict[str, Any] = {
        "stages": {
            stage: {key: summary[key] for key in _FUNNEL if key in summary}
            for stage, summary in summaries.items()
            if stage in DOCUMENT_STAGES
        }
    }
    if "split" in summaries:
        facts["held_out"] = summaries["split"]["validation"]
    if "train-tokenizer" in summaries:
        made = summaries["train-tokenizer"]
        facts["tokenizer"] = {key: made[key] for key in ("vocabulary", "languages", "sources") if key in made}
    if "tokenize" in summaries:
        rows = summaries["tokenize"]
        facts["rows"] = {key: value for key, value in rows.items() if key not in ("seconds", "groups")}
        facts["groups"] = rows["groups"]
        facts["training"] = _epochs(run)
    return facts


def _epochs(run: Path) -> dict[str, Any] | None:
    rows = TrainingRows(run, "pretrain")
    try:
        told = {"steps": rows.steps, "batch": rows.feed.batch_size, "mixture": rows.told["mixture"]}
        return told | {"epochs": rows.feed.epochs(rows.steps)}
    except UserError:  # no pretraining, or of a batch that nobody knows yet
        return None
