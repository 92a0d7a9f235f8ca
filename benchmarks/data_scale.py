"""From raw text to packed rows at a size that must not fit in memory: rate, peak memory and disk of every step.

    python benchmarks/data_scale.py [--quick] [--gigabytes 2] [--text FILE.jsonl.gz ...]
    python benchmarks/data_scale.py --table benchmarks/results/data_scale.json

Documents of about 2 KB are put together at random from the sentences of the given JSON Lines files (key `text`), or of
the pocket world; a tenth of them are exact copies of others, a tenth near copies. The steps are those of `affinage
data`. Memory and CPU seconds are those of all its processes together, sampled every 0.2 s; memory is what is resident,
with the pages of files that the system may take back. The peer of the peak memory is the limit of 2 GB. `--table`
prints what 1 TB and 100 TB would cost at the rates of a result, by seconds of CPU.
"""

import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from measuring import Result, finish, options_of, result

STEPS = ("ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize")
PER_FILE = 50_000_000  # bytes of text in one input file
POOL = 40_000_000  # bytes of sentences to draw from, at most
DOCUMENT = 2_000  # bytes
MEMORY = 2e9  # bytes that all processes together may take


def sentences(files: list[Path], folder: Path) -> list[list[str]]:
    """Return the sentences of either language, whose documents have a key `lang` or files with `_fr` in the name."""
    from affinage.data.synthetic import write_world

    if not files:
        write_world(folder / "world", megabytes=3, seed=0)
        files = sorted((folder / "world" / "documents").glob("*.jsonl"))
    pools: dict[str, list[str]] = {"en": [], "fr": []}
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for line in lines.readlines(POOL // len(files)):
                document = json.loads(line)
                language = document.get("lang") or ("fr" if "_fr" in file.name else "en")
                parts = re.split(r"(?<=[.!?»”])\s+", document["text"])
                if language in pools:
                    pools[language] += [part for part in parts if 30 < len(part) < 400]
    return [pool for pool in pools.values() if pool]


def write_input(pools: list[list[str]], folder: Path, megabytes: float) -> int:
    """Write JSON Lines files of generated documents and return their bytes of text."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    recent: list[tuple[list[str], list[str]]] = []  # pool and sentences
    total = 0
    for number in itertools.count():
        copied = draw.random() if recent else 1.0
        if copied < 0.2:
            pool, text = draw.choice(recent)
            if copied < 0.1:
                text = list(text)
                text[draw.randrange(len(text))] = draw.choice(pool)
        else:
            pool, text = draw.choice(pools), []
            while sum(map(len, text)) < DOCUMENT:
                text.append(draw.choice(pool))
            recent.append((pool, text))
            del recent[:-20_000]
        with (folder / f"part-{total // PER_FILE:05d}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": f"d{number}", "text": " ".join(text)}, ensure_ascii=False) + "\n")
        total += len(" ".join(text).encode())
        if total >= megabytes * 1e6:
            break
    return total


def sampled(process: psutil.Process) -> tuple[float, int, float]:
    """Return the time, and of a process with its descendants the resident bytes and the seconds of CPU so far.

    Descendants that have ended count into their parents' seconds.
    """
    times = process.cpu_times()
    resident, seconds = 0, times.children_user + times.children_system
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
            seconds += times.user + times.system
            resident += each.memory_info().rss
        except psutil.Error:
            continue  # it ended just now
    return time.time(), resident, seconds


def measure(folder: Path, megabytes: float, files: list[Path]) -> list[Result]:
    """Run the steps in a folder and return their lines."""
    size = write_input(sentences(files, folder), folder / "input", megabytes)
    recipe = {
        "base": "novels",
        "name": "scale",
        "data": {"root": str(folder), "sources": [{"path": "input", "name": "generated"}]},
        "tokenizer": {"vocab_size": 16_000 if files else 3_000, "sample_bytes": round(min(30, megabytes / 4) * 1e6)},
        "packing": {"seq_len": 2048, "num_shards": 16},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "affinage", "data", str(folder / "recipe.yaml"), "--runs", str(folder / "runs")]
    samples = []
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            samples.append(sampled(watched))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    results = []
    for step in STEPS:
        manifest = json.loads((folder / "runs" / "scale" / step / "manifest.json").read_text(encoding="utf-8"))
        start, seconds = datetime.fromisoformat(manifest["started"]).timestamp(), manifest["seconds"]
        during = [sample for sample in samples if start <= sample[0] <= start + seconds + 1] or samples[-1:]
        facts: dict[str, Any] = {"seconds": seconds, "cpu_seconds": during[-1][2] - during[0][2], "text_bytes": size}
        facts |= {"peak_bytes": max(resident for _, resident, _ in during)}
        facts |= {"stored_bytes": sum(file["bytes"] for file in manifest["files"].values())}
        results.append(result(step, size / 1e6 / seconds, "MB/s", **facts))
    peak = max(line["peak_bytes"] for line in results)
    return [*results, result("peak memory", peak / 1e9, "GB", MEMORY / 1e9)]


def table(results: list[Result]) -> None:
    """Print what larger corpora would cost: core-hours and disk, as Markdown."""
    print("| step | MB/s per core | 1 TB: core-hours | 1 TB: TB on disk | 100 TB: core-hours | 100 TB: TB on disk |")
    print("|---|---|---|---|---|---|")
    hours = disk = 0.0
    for line in results:
        if line["name"] not in STEPS:
            continue
        size, seconds = line["text_bytes"], line["cpu_seconds"]
        if line["name"] == "train-tokenizer":  # reads a sample of constant size
            print(f"| train-tokenizer | {seconds / 60:.1f} minutes, whatever the size | | | | |")
            continue
        per_terabyte, kept = 1e12 / size * seconds / 3600, line["stored_bytes"] / size
        print(f"| {line['name']} | {size / 1e6 / seconds:.1f} | {_costs(per_terabyte, kept)} |")
        hours, disk = hours + per_terabyte, disk + kept
    print(f"| all | | {_costs(hours, disk)} |")


def _costs(hours: float, disk: float) -> str:
    return f"{hours:.0f} | {disk:.2f} | {100 * hours:,.0f} | {100 * disk:.0f}"


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="JSON Lines files to draw sentences from")
    parser.add_argument("--table", type=Path, help="a result file: print what larger corpora would cost")
    options = parser.parse_args()
    if options.table:
        table(json.loads(options.table.read_text(encoding="utf-8"))["results"])
        return
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as folder:
        megabytes = 20 if options.quick else 1e3 * options.gigabytes
        finish("data_scale", measure(Path(folder), megabytes, options.text))


if __name__ == "__main__":
    main()
