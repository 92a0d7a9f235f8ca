"""Who changes what a step makes must raise its version: a tiny corpus goes through every step, and each result must be
what is written here beside the step's version.

Where this fails and the change is meant: raise `version=` in pipeline/build.py, and write the line shown into RESULTS.
"""

import hashlib
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import tiny_run
from affinage.data.documents import document_files
from affinage.data.tokenizer import Tokenizer
from affinage.pipeline.store import read_manifest
from affinage.results import read_json
from run_affinage import run

# step: (version, hash of all that is exact, mean of the numbers that a processor may round in its own way)
RESULTS: dict[str, tuple[int, str, float]] = {
    "synthesize": (1, "71be4e4de16b8564", 0.0),
    "ingest": (7, "95a11b6c8ede2cbd", 0.0),
    "filter": (5, "ab4a44c6d461db65", 0.8418),
    "dedup": (5, "9f14425124ff7bdb", 0.84108),
    "decontaminate": (6, "9892894a43645e5a", 0.84164),
    "split": (4, "92b9f5fb957fe147", 0.8416),
    "train-tokenizer": (2, "0648cdd4b0762a22", 0.0),
    "tokenize": (4, "2a3084ddeea974a8", 0.0),
    "sft-data": (11, "49eb862a0edc842c", 0.0),
    "preference-data": (11, "1fc0c1534d5a964f", 0.0),
    "pretrain": (5, "4538bfaaadc1606d", 1.5016),
    "sft": (5, "fad448c32c482c5a", 1.3001),
    "ref-logprobs": (2, "56eb4f072a06ffa4", 3.5479),
    "dpo": (5, "a53c2deb7370ca8e", -0.28489),
    "evaluate-base": (5, "f91c3f9a057483cc", 0.36981),
    "evaluate-sft": (5, "a061a8b693036f7c", 0.33348),
    "evaluate-dpo": (5, "949c78b6d1649071", 0.33348),
    "export": (6, "1d9dce12f21a5b77", 0.94481),
    "report": (4, "f04237ec5f2be45c", 0.0),
}

# What says how a result was made, or is read by nothing that comes after; checkpoints are judged by what they score.
_LEFT_OUT = re.compile(r"(manifest|request|result|summary)\.json|(checkpoints|frozen|profile)/.*|.*\.lock")
_OF_THE_MACHINE = {
    "seconds", "tokens_per_second", "mfu", "data_time", "step_time", "goodput", "memory_gigabytes",
    "devices", "device", "items_per_second", "fingerprint", "url",
}  # fmt: skip


def contents(file):
    """What stands in a file, apart from how it is written."""
    if file.suffix == ".parquet":
        return pq.read_table(file).to_pylist()
    if file.suffix == ".npy":
        return np.load(file)
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.name == "tokenizer.model":
        tokenizer = Tokenizer(file.parent)
        return [tokenizer.decode([token]) for token in range(tokenizer.vocabulary)]
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    if file.suffix == ".html":  # the numbers in it are of the other steps, and of the machine
        return re.findall(r"<(h[1-6]|table|section|details|figure)\b", re.sub(r"(?s)<svg.*?</svg>", "", text))
    if file.suffix == ".md":
        return re.findall(r"^#.*", text, re.MULTILINE)
    return json.loads(text) if file.suffix == ".json" else text


def split(value, numbers: list[float]):
    """The value without its floating-point numbers, which go into the list."""
    if isinstance(value, dict):
        return {str(key): split(entry, numbers) for key, entry in sorted(value.items()) if key not in _OF_THE_MACHINE}
    if isinstance(value, list | tuple):
        return [split(entry, numbers) for entry in value]
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        numbers.append(float(np.abs(value).mean()))
        return list(value.shape)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, float):
        numbers.append(value)
        return None
    return re.sub(r"-[0-9a-f]{12}\b", "", value) if isinstance(value, str) else value  # the key of a result


def made(folder) -> tuple[str, float]:
    """(hash of all that is exact, mean of all numbers) in a result."""
    numbers: list[float] = []
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    found = {name: split(contents(files[name]), numbers) for name in sorted(files) if not _LEFT_OUT.fullmatch(name)}
    if not found:  # the step makes nothing but what it tells
        found = {"summary": split(read_json(folder / "result.json"), numbers)}
    exact = hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return exact, float(f"{np.mean(np.arcsinh(numbers)):.5g}") if numbers else 0.0  # large ones do not hide small ones


def check(run, steps: list[str]) -> None:
    """Every step's result is the one that is noted for its version."""
    lines = []
    for step in steps:
        version, (exact, mean) = read_manifest(run / step)["version"], made((run / step).resolve())
        noted = RESULTS.get(step, (0, "", 0.0))
        if noted[:2] != (version, exact) or mean != pytest.approx(noted[2], rel=1e-3, abs=1e-6):
            lines.append(f'    "{step}": ({version}, "{exact}", {mean}),  # noted: {noted}')
    assert not lines, "these steps make something else than what is noted for their versions:\n" + "\n".join(lines)


def test_every_step_of_a_run_from_text_makes_what_its_version_stands_for(tiny_runs):
    steps = [path.name for path in (tiny_runs / "tiny").iterdir() if path.is_dir()]
    assert set(steps) == RESULTS.keys() - {"decontaminate"}
    check(tiny_runs / "tiny", steps)


def test_so_do_those_that_few_recipes_have(own_runs, tmp_path):
    text = pq.read_table(document_files(own_runs / "tiny/dedup")[0], columns=["text"])["text"][0].as_py()
    (tmp_path / "items.txt").write_text(" ".join(text.split()[3:15]) + "\n")
    items = f"data.decontaminate={{benchmark_files: ['{tmp_path / 'items.txt'}'], benchmarks: false, n_grams: 5}}"
    run("run", *tiny_run.WORDS, "--until", "decontaminate", "--runs", own_runs, settings=["name=more", items])
    check(own_runs / "more", ["decontaminate"])
