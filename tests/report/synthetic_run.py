"""A made-up run folder with the files that stages write, for tests of the report. No figure in it was measured.

What the stages say of themselves is in synthetic_run.json, where `HOSTILE` stands for a hostile text.
"""

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
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
STEPS = {"pretrain": 600, "sft": 400}
VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8", "affinage": "0.1.0"}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


@contextmanager
def change(path: Path) -> Iterator[Any]:
    """The content of a JSON file, which is written again as it is at the end of the block."""
    content = json.loads(path.read_text())
    yield content
    write_json(path, content)


def build_run(folder: Path, *, steps: int = STEPS["pretrain"], name: str = "synthetic") -> Path:
    """A whole run, every optional field filled."""
    run, text = folder / name, Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    told = json.loads(text.replace("HOSTILE", json.dumps(HOSTILE)[1:-1]))
    write_json(run / "recipe.json", told["recipe"] | {"name": name})
    started = 0
    for each in told["stages"]:
        stage, summary = each["step"], each["summary"]
        if stage in STEPS:
            length = steps if stage == "pretrain" else STEPS[stage]
            summary = told["training"] | {"steps": length, "tokens": length * 1024}
            summary |= {"resumed_at": [250] if length == STEPS["pretrain"] else []}
            summary["predicted"] |= {"flops": 9.6e9 * length}
            write_metrics(run / stage / "metrics.jsonl", length, seed=length)
            write_json(run / stage / "model.json", {"graph": told["recipe"]["model"], "context": 128})
        if stage.startswith("evaluate"):
            write_json(run / stage / "results.json", told["results"][stage.removeprefix("evaluate-")])
        if stage == "dedup":
            write_duplicates(run)
        manifest = {"step": stage, "seconds": each["seconds"], "versions": VERSIONS, "settings": {}, "inputs": {}}
        manifest["key"] = f"{random.Random(stage).getrandbits(256):064x}"
        manifest["files"] = {f"{stage}.bin": {"bytes": 123_456, "sha256": "0" * 64}}
        manifest["started"] = f"2026-01-02T03:{4 + started // 60:02d}:{started % 60:02d}Z"
        write_json(run / stage / "manifest.json", manifest)
        write_json(run / stage / "result.json", summary)
        started += int(each["seconds"])
    return run


def write_duplicates(run: Path, kept: str = KEPT, near: str = NEAR) -> None:
    """The documents and the removed near duplicates that the page shows."""
    texts = {"world/000006": kept, "world/000007": near, "world/000008": kept, "world/000009": kept + HOSTILE[:90]}
    source = ["pocket-world"] * 4
    documents = {"id": list(texts), "source": source, "text": list(texts.values())}
    removed = {"source": source[1:], "id": list(texts)[1:], "duplicate_of": ["world/000006"] * 3}
    removed |= {"duplicate_of_source": source[1:], "exact": [False, True, False], "jaccard": [0.86, 1.0, 0.81]}
    for file, columns in (("filter/documents-0", documents), ("dedup/removed", removed)):
        path = run / f"{file}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def write_metrics(path: Path, steps: int, seed: int) -> None:
    noise, points, lines = random.Random(seed), [], list[dict[str, Any]]()
    for step in range(1, steps + 1):
        falling, middle = math.exp(-9 * step / steps), step == steps // 2
        if step % 2 == 0 or step == 1:
            lines.append(
                {
                    "step": step,
                    "loss": None if middle else 0.9 + 7.1 * falling + noise.gauss(0, 0.07),
                    "grad_norm": 0.6 + 2.5 * falling + abs(noise.gauss(0, 0.15)) + 4 * middle,
                    "learning_rate": 2e-3 * min(1.0, 20 * step / steps) * (1.1 + math.cos(math.pi * step / steps)),
                    "expert_load_max": 1.4 + abs(noise.gauss(0, 0.1)),
                    "dropped_share": abs(noise.gauss(0, 0.01)),
                    "tokens_per_second": 22_500 + noise.gauss(0, 900) - (9000 if step % 300 == 0 else 0),
                    "mfu": None,
                }
            )
        if step % (steps // 6) == 0:
            loss = 0.93 + 7.1 * falling
            validation = {"pocket-world.en": {"loss": loss, "bits_per_byte": loss / 3}}
            validation["pocket-world.fr"] = {"loss": loss + 0.08, "bits_per_byte": loss / 2.9}
            lines.append({"step": step, "validation": validation})
            if path.parent.name == "pretrain":
                score = {"value": 0.3 + 0.4 * step / steps, "stderr": 0.04}
                points.append({"step": step, "scores": {"hellaswag": score}, "worse": []})
                lines.append({"step": step, "evaluation": {"tasks": {}}})
    if points:
        write_json(path.parent / "monitor.json", {"threshold": 1e-3, "points": points})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 99', encoding="utf-8")  # as a kill leaves it
