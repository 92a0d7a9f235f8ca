"""From raw text to packed rows at a size that must not fit in memory: rate, peak memory and disk of every stage.

    python benchmarks/data_scale.py [--quick] [--gigabytes 2] [--text FILE.jsonl.gz ...] [--no-language-id]
    python benchmarks/data_scale.py --table benchmarks/results/data_scale.json

Documents of about 2 KB are put together at random from the sentences of the given JSON Lines files (key `text`), or of
the pocket world; a tenth of them are exact copies of others, a tenth near copies. The stages are those of `affinage
data`, run as a user would. Of all its processes together, looked at every 0.2 s, memory is what is resident (pages of
files, which the system may take back, included) and rates are by the clock and by seconds of CPU: on a machine with
other work, only the latter mean something. Language id, the slowest step by far, is also measured by itself;
`--no-language-id` leaves it out of the stages. `--table` prints what 1 TB and 100 TB would cost at the rates of a
result, by seconds of CPU.
"""

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import yaml

STAGES = ("ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize")
PER_FILE = 50_000_000  # bytes of text in one input file
POOL = 40_000_000  # bytes of sentences to draw from, at most
DOCUMENT = 2_000  # bytes


def sentences(files: list[Path], folder: Path) -> dict[str, list[str]]:
    """Sentences in English and French."""
    if not files:
        from affinage.data.synthetic import write_world

        write_world(folder / "world", megabytes=3, seed=0)
        files = sorted((folder / "world" / "documents").glob("*.jsonl"))
    found: dict[str, list[str]] = {"en": [], "fr": []}
    for file in files:
        size = 0
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)
                language = document.get("lang") or ("fr" if "_fr" in file.name else "en")
                if language in found:
                    found[language] += [s for s in re.split(r"(?<=[.!?»”])\s+", document["text"]) if 30 < len(s) < 400]
                size += len(line)
                if size > POOL / len(files):
                    break
    return found


def documents(pool: dict[str, list[str]], megabytes: float) -> Iterator[tuple[str, list[str]]]:
    """Language and sentences of each document."""
    rng = random.Random(0)
    recent: list[tuple[str, list[str]]] = []
    written = 0.0
    while written < megabytes * 1e6:
        draw = rng.random()
        if recent and draw < 0.1:
            language, text = rng.choice(recent)
        elif recent and draw < 0.2:
            language, text = rng.choice(recent)
            text = list(text)
            text[rng.randrange(len(text))] = rng.choice(pool[language])
        else:
            language, text, size = rng.choice(list(pool)), [], 0
            while size < DOCUMENT:
                text.append(rng.choice(pool[language]))
                size += len(text[-1])
            if len(recent) < 20_000:
                recent.append((language, text))
            else:
                recent[rng.randrange(20_000)] = (language, text)
        yield language, text
        written += sum(len(part.encode()) + 1 for part in text)


def write_input(pool: dict[str, list[str]], folder: Path, megabytes: float) -> int:
    """JSON Lines files of generated documents; how many bytes of text."""
    folder.mkdir(parents=True)
    total, size, file = 0, 0, None
    for number, (_, text) in enumerate(documents(pool, megabytes)):
        if file is None or size > PER_FILE:
            file = (folder / f"part-{total // PER_FILE:05d}.jsonl").open("a", encoding="utf-8")
            size = 0
        joined = " ".join(text)
        file.write(json.dumps({"id": f"d{number}", "text": joined}, ensure_ascii=False) + "\n")
        size += len(joined.encode())
        total += len(joined.encode())
    return total


Sample = tuple[float, int, float]  # time, resident bytes, seconds of CPU so far


def sampled(process: psutil.Process) -> Sample:
    """A process and all its descendants now; those that have ended count into their parents' seconds."""
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


def run_stages(folder: Path, recipe: Path) -> list[Sample]:
    """Run the data stages; what they used over time."""
    command = [sys.executable, "-c", "from affinage.cli import main; main()"]
    samples = []
    with subprocess.Popen([*command, "data", str(recipe), "--runs", str(folder / "runs")]) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            samples.append(sampled(watched))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    return samples


def language_id(pool: dict[str, list[str]]) -> dict[str, object]:
    """MB of text a second of CPU."""
    from affinage.data.language import identify_language

    texts = [" ".join(text) for _, text in documents(pool, 2)]
    identify_language(texts[0])  # loads the model
    start = time.process_time()
    for text in texts:
        identify_language(text)
    rate = sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - start)
    print(f"language id: {rate:.1f} MB/s a core")
    return {"name": "language id", "ours": rate, "peer": None, "unit": "MB/s a core", "ratio": None}


def measure(folder: Path, megabytes: float, files: list[Path], identify: bool) -> list[dict[str, object]]:
    pool = sentences(files, folder)
    identification = language_id(pool)
    size = write_input(pool, folder / "input", megabytes)
    del pool
    recipe = {
        "base": "novels",
        "name": "scale",
        "data": {"root": str(folder), "sources": [{"path": "input", "name": "generated"}]}
        | ({} if identify else {"filters": {"language_threshold": 0}}),
        "tokenizer": {"vocab_size": 16_000 if files else 3_000, "sample_bytes": round(min(30, megabytes / 4) * 1e6)},
        "packing": {"seq_len": 2048, "num_shards": 16},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    samples = run_stages(folder, folder / "recipe.yaml")
    results = []
    print(f"\n{size / 1e9:.2f} GB of text, {psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("stage              s   MB/s  CPU s  peak MB  result MB")
    for stage in STAGES:
        manifest = json.loads((folder / "runs" / "scale" / stage / "manifest.json").read_text(encoding="utf-8"))
        start, seconds = datetime.fromisoformat(manifest["started"]).timestamp(), manifest["seconds"]
        during = [sample for sample in samples if start <= sample[0] <= start + seconds + 1]
        peak, used = max(sample[1] for sample in during), during[-1][2] - during[0][2]
        stored = sum(file["bytes"] for file in manifest["files"].values())
        speed = size / 1e6 / seconds
        print(f"{stage:15} {seconds:5.1f} {speed:6.1f} {used:6.0f} {peak / 1e6:8.0f} {stored / 1e6:10.0f}")
        facts = {"cpu_seconds": used, "peak_bytes": peak, "stored_bytes": stored, "text_bytes": size}
        results.append(
            {"name": stage, "ours": speed, "peer": None, "unit": "MB/s", "ratio": None, "seconds": seconds, **facts}
        )
    total, used = (sum(float(r[name]) for r in results) for name in ("seconds", "cpu_seconds"))
    peak = max(int(r["peak_bytes"]) for r in results)
    print(f"{'all':12} {total:5.1f} {size / 1e6 / total:6.1f} {used:6.0f} {peak / 1e6:8.0f}")
    facts = {"cpu_seconds": used, "peak_bytes": peak, "text_bytes": size, "seconds": total, "language_id": identify}
    rate = {"ours": size / 1e6 / total, "peer": None, "unit": "MB/s", "ratio": None}
    return [*results, identification, {"name": "all", **rate, **facts}]


def table(results: list[dict[str, object]]) -> None:
    """What larger corpora would cost: core-hours, and hours on 1, 32 and 1,000 cores, as Markdown."""
    identified = next(bool(r["language_id"]) for r in results if r["name"] == "all")
    print("| stage | MB/s a core | 1 TB: core-hours | 1 TB: TB on disk | 100 TB: core-hours | 100 TB: TB on disk |")
    print("|---|---|---|---|---|---|")
    hours = disk = fixed = 0.0
    for r in (r for r in results if r["name"] != "all"):
        if r["name"] == "language id":
            if identified:
                continue  # it is in the step `filter`
            seconds, size, kept = 1.0, float(r["ours"]) * 1e6, 0.0
        else:
            size, seconds = float(r["text_bytes"]), float(r["cpu_seconds"])
            kept = float(r["stored_bytes"]) / size
        if r["name"] == "train-tokenizer":  # a sample of constant size, most of it in one thread
            fixed = seconds / 3600
            print(f"| train-tokenizer | {fixed * 60:.1f} minutes, whatever the size | | | | |")
            continue
        per_terabyte = 1e12 / size * seconds / 3600
        rate = size / 1e6 / seconds
        cells = (f"{rate:.1f}", f"{per_terabyte:.0f}", f"{kept:.2f}", f"{100 * per_terabyte:,.0f}", f"{100 * kept:.0f}")
        print(f"| {r['name']} | {' | '.join(cells)} |")
        hours, disk = hours + per_terabyte, disk + kept
    print(f"| all | | {hours:.0f} | {disk:.2f} | {100 * hours:,.0f} | {100 * disk:.0f} |\n")
    print("| text | 1 core | 32 cores | 1,000 cores |\n|---|---|---|---|")
    for terabytes in (1, 100):
        cells = [_told(terabytes * hours / cores + fixed) for cores in (1, 32, 1000)]
        print(f"| {terabytes} TB | {' | '.join(cells)} |")


def _told(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 MB, in under a minute")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="JSON Lines files to draw sentences from")
    parser.add_argument("--no-language-id", action="store_true", help="take every document as it is")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder); removed afterwards")
    parser.add_argument("--table", type=Path, help="a result file: print what larger corpora would cost")
    arguments = parser.parse_args()
    if arguments.table:
        table(json.loads(arguments.table.read_text(encoding="utf-8"))["results"])
        return
    folder = Path(tempfile.mkdtemp(prefix="affinage-bench-", dir=arguments.folder))
    try:
        results = measure(
            folder, 20 if arguments.quick else 1e3 * arguments.gigabytes, arguments.text, not arguments.no_language_id
        )
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"benchmark": "data_scale", "results": results}))


if __name__ == "__main__":
    main()
