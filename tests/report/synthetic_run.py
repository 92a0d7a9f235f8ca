"""A made-up run folder with the files that stages write, for tests of the report. No figure in it was measured."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)> \"quoted\" & 'single' </style></script>"
    "<!-- {{ 7 * 7 }} {% raw %} \u202e\x00\x1b[31m \ud800 end"
)
KEPT = "Japan is a country in Asia. Its currency is the yen, and its people speak Japanese."
NEAR = "Japan is a country in Asia. The currency is the yen, and most people speak Japanese there."
STEPS, SFT_STEPS = 600, 400


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def build_run(folder: Path, *, language: str = "en", steps: int = STEPS, name: str = "synthetic") -> Path:
    """A whole run, every optional field filled."""
    run = folder / name
    write_json(run / "recipe.json", recipe(language, name))
    started = 0
    for stage, seconds, summary in (
        *data_stages(),
        ("pretrain", 206.0, {}),
        ("conversations", 1.1, conversations_summary()),
        ("sft", 31.0, {}),
        ("probe", 4.0, probe_summary()),
        ("evaluate-base", 9.0, {}),
        ("evaluate-sft", 9.5, {}),
        ("export", 2.2, {"files": 6}),
    ):
        if stage in ("pretrain", "sft"):
            length = steps if stage == "pretrain" else SFT_STEPS
            summary = training_summary(length)
            write_json(run / stage / "summary.json", summary)
            write_metrics(run / stage / "metrics.jsonl", length, seed=length)
            write_json(run / stage / "model.json", {"graph": recipe(language, name)["model"], "context": 128})
        if stage.startswith("evaluate"):
            write_json(run / stage / "results.json", results(stage.removeprefix("evaluate-")))
        if stage == "deduplicate":
            write_duplicates(run)
        write_json(run / stage / "manifest.json", manifest(stage, seconds, summary, started))
        started += int(seconds)
    return run


def recipe(language: str, name: str) -> dict[str, Any]:
    block = {"kind": "transformer_block", "in": "embed", "repeat": 3, "attention": {"heads": 4}, "ffn": {"width": 384}}
    return {
        "name": name,
        "description": "A made-up run that shows every part of a report.",
        "seed": 0,
        "data": {"sources": [{"path": "pocket-world", "megabytes": 3.0}], "languages": ["en", "fr"]},
        "model": {
            "inputs": ["tokens"],
            "nodes": {
                "embed": {"kind": "embedding", "in": "tokens", "vocab": 3072, "width": 128},
                "blocks": block,
                "norm": {"kind": "rms_norm", "in": "blocks"},
                "logits": {"kind": "unembed", "in": "norm", "vocab": 3072},
                "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
            },
        },
        "report": {"language": language, "prompts": ["The capital"], "questions": ["What is the currency of Japan?"]},
    }


def manifest(stage: str, seconds: float, summary: dict[str, Any], started: int) -> dict[str, Any]:
    return {
        "stage": stage,
        "key": f"{random.Random(stage).getrandbits(256):064x}",
        "settings": {},
        "inputs": {},
        "files": {
            f"{stage}.bin": {"bytes": 123_456, "sha256": "0" * 64},
            "summary.json": {"bytes": 812, "sha256": "1" * 64},
        },
        "started": f"2026-01-02T03:{4 + started // 60:02d}:{started % 60:02d}Z",
        "seconds": seconds,
        "summary": summary,
        "versions": {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8", "affinage": "0.1.0"},
    }


def _sample(text: str, index: int, **more: str) -> dict[str, str]:
    return {"id": f"world/{index:06d}", "source": "pocket-world", "text": text, "detail": "", **more}


def _flow(documents: tuple[int, int], size: tuple[int, int], removed: dict[str, int], samples: Any) -> dict[str, Any]:
    out, left = documents[1], size[1]
    english = {"documents": int(out * 0.52), "bytes": int(left * 0.5)}
    french = {"documents": out - english["documents"], "bytes": left - english["bytes"]}
    counts = dict(zip(("documents_in", "documents_out", "bytes_in", "bytes_out"), (*documents, *size), strict=True))
    by_source = {"pocket-world": {"documents": out, "bytes": left}}
    told = {
        "removed": removed,
        "samples": samples,
        "by_language": {"en": english, "fr": french},
        "by_source": by_source,
    }
    return {**counts, **told, "seconds": 1.0}


def data_stages() -> list[tuple[str, float, dict[str, Any]]]:
    samples = {
        "too short": [_sample("Oui.", 1), _sample("OK then", 2)],
        "other language": [_sample("Der Euro ist die Währung von Österreich.", 3, detail="de, p = 0.98")],
        "not enough letters": [_sample("=-=-=-=-=- *** ### ||| ~~~ ;;; /// %%% $$$", 4, detail="0.02")],
        "binary": [_sample(HOSTILE, 5)],
    }
    removed = {"too short": 412, "other language": 260, "not enough letters": 148, "binary": 61}
    duplicates = {
        "near duplicate": [_sample(NEAR, 7, detail="Jaccard 0.860 to world/000006 of pocket-world")],
        "exact duplicate": [_sample(KEPT, 8, detail="Jaccard 1.000 to world/000006 of pocket-world")],
    }
    rows = {
        "train": {"rows": 5230, "tokens": 669_440, "documents": 10_690, "bytes": 2_300_000},
        "validation": {
            "pocket-world.en": {"rows": 41, "tokens": 5248, "documents": 80, "bytes": 17_800},
            "pocket-world.fr": {"rows": 44, "tokens": 5632, "documents": 77, "bytes": 19_100},
        },
        "dtype": "uint16",
        "context": 128,
    }
    tokenizer = {
        "vocabulary": 3072,
        "measured_on": "validation",
        "languages": {
            "en": {"bytes_per_token": 4.41, "tokens_per_word": 1.18, "tokens": 331_000, "words": 280_000},
            "fr": {"bytes_per_token": 4.12, "tokens_per_word": 1.31, "tokens": 352_000, "words": 268_000},
        },
        "sources": {"pocket-world": {"bytes_per_token": 4.26, "tokens_per_word": 1.24, "tokens": 683_000, "words": 1}},
        "round_trip": {"documents": 10_690, "exact": 10_690},
    }
    kept = {"documents": 800, "bytes": 9000, "documents_kept": [799, 640], "bytes_kept": [8999, 6300]}
    thresholds = {
        "thresholds": {"grid": [0.5, 0.8], "costs": [{"source": "pocket-world", "language": "fr"} | kept]},
        "masked": {"e-mail": 3},
    }
    match = {"document": "world/9", "source": "pocket-world", "benchmark": "quiz", "item": "17", "words": 13}
    found = {
        "benchmarks": {"quiz": {"items": 1234, "too_short": 5, "found": 1, "documents": 1}},
        "matches": [match | {"text": HOSTILE}],
        "boilerplate": {"in_items": 40, "in_documents": 2},
    }
    published = {
        "name": "gpt2_vocab.bpe",
        "vocabulary": 50_257,
        "languages": {"en": {"bytes_per_token": 4.5}, "fr": {"bytes_per_token": 2.875}},
        "sources": {"pocket-world": {"bytes_per_token": 3.5}},
        "round_trip": {"documents": 10_690, "exact": 10_689},
    }
    split = {"validation_documents": 157, "validation_bytes": 37_000, "without_validation": ["notes.fr"]}
    twice = {"near duplicate": 930, "exact duplicate": 442}
    kept_of = [(13_100, 3_050_000), (13_100, 3_050_000), (12_219, 2_730_000), (10_847, 2_337_000), (10_846, 2_336_000)]
    reasons = [({}, {}), (removed, samples), (twice, duplicates), ({"in a benchmark": 1}, {})]
    collect, clean, deduplicate, decontaminate = (
        _flow(*zip(before, after, strict=True), *why) for before, after, why in zip(kept_of, kept_of[1:], reasons)
    )
    ends = kept_of[-1]
    return [
        ("world", 2.4, {"documents": 13_100}),
        ("collect", 0.9, collect),
        ("clean", 1.6, clean | thresholds),
        ("deduplicate", 1.2, deduplicate),
        ("decontaminate", 0.4, decontaminate | found),
        ("split", 0.4, _flow((ends[0], 10_690), (ends[1], 2_300_000), {}, {}) | split),
        ("tokenizer", 3.8, tokenizer),
        ("compare-tokenizers", 1.1, {"tokenizers": [{"name": "", **tokenizer}, published]}),
        ("rows", 1.0, rows),
    ]


def write_duplicates(run: Path) -> None:
    """The documents and the clusters of the near duplicates that the page shows."""
    texts = {"world/000006": KEPT, "world/000007": NEAR, "world/000008": KEPT, "world/000009": KEPT + HOSTILE[:90]}
    documents = {"id": list(texts), "source": ["pocket-world"] * 4, "text": list(texts.values())}
    clusters = {
        "source": ["pocket-world"] * 4,
        "id": list(texts),
        "cluster": ["world/000006"] * 4,
        "cluster_source": ["pocket-world"] * 4,
        "kept": [True, False, False, False],
        "exact": [False, False, True, False],
        "jaccard": [1.0, 0.86, 1.0, 0.81],
    }
    for path, columns in (
        (run / "clean" / "documents-0.parquet", documents),
        (run / "deduplicate" / "clusters" / "clusters.parquet", clusters),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def conversations_summary() -> dict[str, Any]:
    train = {"rows": 1200, "tokens": 150_000, "trained_tokens": 61_000, "conversations": 2352}
    counted = {"conversations": 2400, "truncated": 12, "dropped": 3, "reasoning_dropped": 17}
    return {**counted, "context": 128, "train": train}


def probe_summary() -> dict[str, Any]:
    def scores(*accuracies: float) -> dict[str, Any]:
        named = zip(("trained", "random", "pixels"), accuracies, strict=True)
        return {name: {"accuracy": accuracy, "stderr": 0.007} for name, accuracy in named}

    compared = [(None, scores(0.991, 0.982, 0.973)), (10, scores(0.92, 0.886, 0.885)), (5, scores(0.886, 0.81, 0.806))]
    probe = [{"labels_per_class": labels, "scores": found} for labels, found in compared]
    return {"features": "encoder", "held_out": 449, "draws": 10, "probe": probe}


def training_summary(steps: int) -> dict[str, Any]:
    return {
        "parameters": {"total": 1_443_968},
        "flops_per_step": 9.6e9,
        "tokens": steps * 1024,
        "steps": steps,
        "seconds": {"compile": 6.1, "compute": 82.0, "validation": 4.0, "save": 2.1, "total": 94.2},
        "tokens_per_second": 22_478.0,
        "mfu": None,
        "first_loss": 8.05,
        "final_loss": 0.94,
        "validation": {
            "pocket-world.en": {"loss": 0.97, "bits_per_byte": 0.318},
            "pocket-world.fr": {"loss": 1.02, "bits_per_byte": 0.351},
        },
        "predicted": {"parameters": 1_443_968, "flops": 9.6e9 * steps, "seconds": 71.0},
        "devices": {"kind": "cpu", "count": 1},
        "skipped_updates": 1,
        "saves": {"count": 3, "stall_mean": 0.00418, "stall_most": 0.0567},
        "resumed_at": [250] if steps == STEPS else [],
    }


def write_metrics(path: Path, steps: int, seed: int) -> None:
    noise = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        falling, middle = math.exp(-9 * step / steps), step == steps // 2
        if step % 2 == 0 or step == 1:
            line = {
                "step": step,
                "loss": None if middle else 0.9 + 7.1 * falling + noise.gauss(0, 0.07),
                "grad_norm": 0.6 + 2.5 * falling + abs(noise.gauss(0, 0.15)) + 4 * middle,
                "learning_rate": 2e-3 * min(1.0, 20 * step / steps) * (1.1 + math.cos(math.pi * step / steps)),
                "expert_load_max": 1.4 + abs(noise.gauss(0, 0.1)),
                "dropped_share": abs(noise.gauss(0, 0.01)),
                "tokens_per_second": 22_500 + noise.gauss(0, 900) - (9000 if step % 300 == 0 else 0),
            }
            lines.append({**line, "tokens": step * 1024, "mfu": None, "seconds": step / 22})
        if step % (steps // 6) == 0:
            loss = 0.93 + 7.1 * falling
            found = {"en": (loss, loss / 3), "fr": (loss + 0.08, loss / 2.9)}
            validation = {f"pocket-world.{name}": {"loss": a, "bits_per_byte": b} for name, (a, b) in found.items()}
            lines.append({"step": step, "validation": validation})
            if path.parent.name == "pretrain":
                values = {"acc": 0.25 + 0.4 * step / steps, "acc_norm": 0.3 + 0.4 * step / steps}
                scored = {metric: {"value": value, "stderr": 0.04} for metric, value in values.items()}
                bits = {name: bits for name, (_, bits) in found.items()}
                looked = {"tasks": {"hellaswag": scored}, "bits_per_byte": bits}
                lines.append({"step": step, "evaluation": looked})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 99', encoding="utf-8")  # as a kill leaves it


def results(model: str) -> dict[str, Any]:
    tuned = model == "sft"

    def share(base: float, gain: float, items: int) -> dict[str, Any]:
        value = base + gain * tuned
        stderr = math.sqrt(value * (1 - value) / items)
        metrics = {"acc": {"value": value, "stderr": stderr}}
        return {"metrics": metrics, "items": items, "shots": 0, "version": 1, "chance": 0.25}

    choices = {"prompt": "The currency of Japan is", "choices": [" euro", " yen", " dollar"], "target": 1, "chosen": 0}
    samples: dict[str, Any] = {
        "pocket_facts_en": [choices],
        "pocket_arithmetic": [{"prompt": HOSTILE, "target": "twelve", "answer": HOSTILE}],
    }
    if tuned:
        samples["questions"] = [
            {"question": "What is the currency of Japan?", "text": "The currency of Japan is the yen."},
            {"question": "Quelle est la monnaie du Brésil ?", "text": "La monnaie du Brésil est le réal."},
            {"question": "Is this safe? " + HOSTILE, "text": HOSTILE},
        ]
    else:
        samples["prompts"] = [
            {"prompt": "The capital", "text": " letters of the alphabet come first. Japan is in Asia."},
            {"prompt": "La monnaie du Japon", "text": " est le yen. Le Japon se trouve en Asie."},
        ]
    lambada = {"acc": {"value": 0.21, "stderr": 0.012}, "perplexity": {"value": 61.4 - 9 * tuned, "stderr": 2.9}}
    bits = {"en": {"model": 0.318 + 0.02 * tuned, "gzip": 1.61}, "fr": {"model": 0.351 + 0.03 * tuned, "gzip": 1.68}}
    return {
        "model": model,
        "tasks": {
            "pocket_facts_en": share(0.94, 0.02, 400),
            "pocket_facts_fr": share(0.95, -0.004, 400),
            "pocket_facts_other_language_en": share(0.37, 0.03, 120),
            "pocket_arithmetic": share(0.58, 0.11, 300),
            "pocket_agreement_fr": share(0.92, 0.01, 250) | {"chance": 0.5},
            "lambada_openai": {"metrics": lambada, "items": 1000, "shots": 0, "version": 1},
        },
        "seconds": 9.0,
        "items_per_second": 180.0,
        "versions": {"lm_eval": "0.4.13"},
        "bits_per_byte": {f"pocket-world.{name}": each | {"xz": 1.45} for name, each in bits.items()},
        "samples": samples,
        "generation": {"texts": 300, "stopped": {"value": 0.97, "stderr": 0.01}},
    }
