"""Cleaning rules that need no model: Unicode repair, length, and share of letters, on one core, in memory.

    python benchmarks/data_clean.py [--quick]

Ours repairs (control and invisible characters, line ends, NFC) and counts in one pass over the UTF-8 bytes. The peers
do less: `python` is the comprehension of most pipelines and `polars` the same in expressions; both only count, on text
that needs no repair. A third line is the same repair in Python. Decontamination's scan is measured by itself, and so is
language id, which is fastText's own code and what a step with it waits for.
"""

import argparse
import json
import random
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from statistics import median

import polars as pl
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.language import identify_language
from affinage.data.overlap import ItemIndex
from affinage.data.repair import repair

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "data"))
from planted_copies import lexicon, random_text, written

CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0xFEFF])


def by_python(texts: list[str]) -> list[bool]:
    kept = []
    for text in texts:
        letters = sum(map(str.isalnum, text))
        visible = len(text) - sum(map(str.isspace, text))
        kept.append(100 <= len(text) <= 500_000 and letters >= 0.7 * visible)
    return kept


def by_polars(texts: pl.Series) -> list[bool]:
    text = pl.col("text")
    letters = text.str.count_matches(r"[\p{L}\p{N}]")
    visible = text.str.len_chars() - text.str.count_matches(r"\s")
    rule = text.str.len_chars().is_between(100, 500_000) & (letters >= 0.7 * visible)
    return texts.to_frame("text").select(rule).to_series().to_list()


def by_kernel(column: pa.Array) -> list[bool]:
    texts = repair(column)
    long_enough = (texts.characters >= 100) & (texts.characters <= 500_000)
    return (long_enough & (texts.alphanumeric >= 0.7 * texts.counted)).tolist()


def repaired_by_python(texts: list[str]) -> list[str]:
    return [
        unicodedata.normalize("NFC", text.translate(CONTROLS).replace("\r\n", "\n").replace("\u2581", "_"))
        for text in texts
    ]


def cpu_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of CPU over all threads: the machine may have other work, and polars uses all cores."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


def scans(column: pa.Array, megabytes: float) -> list[dict[str, object]]:
    """The scan for benchmark items."""
    rng = random.Random(2)
    words = lexicon(20_000, rng)
    items = [
        BenchmarkItem("quiz", str(k), (written(random_text(words, rng.randint(8, 60), rng)),)) for k in range(30_000)
    ]
    index = ItemIndex(items, DecontaminateSettings())
    results = []
    for name, run in ((f"decontamination, {index.keys.size:,} runs looked for", lambda: index.scan(column)),):
        run()
        rate = megabytes / cpu_seconds(run, 3)
        print(f"{name}: {rate:.0f} MB/s")
        results.append({"name": name, "ours": rate, "peer": None, "unit": "MB/s", "ratio": None})
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2,000 documents, in under a minute")
    count = 2_000 if parser.parse_args().quick else 30_000
    rng = random.Random(1)
    words = lexicon(20_000, rng)
    texts = [written(random_text(words, rng.randint(10, 640), rng)) for _ in range(count)]
    column, series = pa.array(texts), pl.Series("text", texts)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    assert by_kernel(column) == by_python(texts) == by_polars(series)
    assert repair(column).text.to_pylist() == repaired_by_python(texts)

    ours = megabytes / cpu_seconds(lambda: by_kernel(column))
    print(f"{count} documents, {megabytes:.1f} MB; repair and rules: {ours:.0f} MB/s")
    results = []
    for name, run in (
        ("python, rules only", lambda: by_python(texts)),
        ("polars, rules only", lambda: by_polars(series)),
        ("python, repair only", lambda: repaired_by_python(texts)),
    ):
        peer = megabytes / cpu_seconds(run, 3)
        print(f"{name}: {peer:.0f} MB/s, {ours / peer:.1f} times slower")
        results.append({"name": name, "ours": ours, "peer": peer, "unit": "MB/s", "ratio": ours / peer})
    results += scans(column, megabytes)
    rate = 500 / cpu_seconds(lambda: [identify_language(text) for text in texts[:500]], 3)
    results.append({"name": "language id", "ours": rate, "peer": None, "unit": "documents/s", "ratio": None})
    print(f"language id: {rate:,.0f} documents/s")
    print(json.dumps({"benchmark": "data_clean", "results": results}))


if __name__ == "__main__":
    main()
