"""The Hugging Face Hub in its own protocol, from the user's commands inwards; the client's libraries are the real ones.

Each command is a process with HF_ENDPOINT set: the libraries read it as they are loaded.
"""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hub_server
import tiny_run
from affinage.hub.folder import CardFacts, export, local_copy
from affinage.results import read_json
from hub_server import Fault
from run_affinage import refused, set_words
from source_forms import rows_of
from tiny_models import tiny_llama

TOKEN = "hf_of_a_reader"
# The libraries wait for a minute and more before they give up; nothing else is changed.
PROGRAM = """
import time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
from affinage.cli import main
main()
"""
CARD = """---
configs:
- config_name: other
  data_files: [{split: train, path: other.parquet}]
- config_name: tables
  data_files: [{split: dev, path: dev/*.parquet}, {split: train, path: train/*.parquet}]
---
"""


def refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """The one message of a command that was refused, and what to do, without what libraries say meanwhile."""
    transient = re.search(r"\b(429|5\d\d)\b|cannot be reached", ended.stderr) and "HF_HUB_OFFLINE" not in ended.stderr
    assert ended.returncode == (1 if transient else 2) and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    (message,) = re.findall(r"^Error: .*", ended.stderr, re.DOTALL | re.MULTILINE)
    assert message.strip().count("\n") == 1, message
    return message


@dataclass
class Machine:
    """Where commands run."""

    environment: dict[str, str]
    folder: Path

    def run(self, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = self.environment | ({"HF_TOKEN": token} if token else {})
        command = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=300)
        assert TOKEN not in done.stdout + done.stderr
        return done

    def collect(self, sources: str, *settings: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a recipe until its sources are collected."""
        words = set_words(f"data.sources={sources}", "data.workers=1", *settings)
        return self.run("run", str(tiny_run.RECIPE), "--until", "ingest", *words, token=token)

    def collected(self) -> tuple[list[str], dict]:
        """The texts, and the step's summary."""
        folder = self.folder / "runs/tiny/ingest"
        return [row["text"] for row in rows_of(folder)], read_json(folder / "result.json")


@pytest.fixture
def hub():
    with hub_server.serving() as hub:
        yield hub


@pytest.fixture
def machine(hub, tmp_path) -> Machine:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_DATASETS_OFFLINE": "0", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    (tmp_path / "work").mkdir()
    return Machine(environment | {"AFFINAGE_CACHE": str(tmp_path / "cache")}, tmp_path / "work")


def parquet(of: str) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(documents(of)), written, row_group_size=7)
    return written.getvalue()


def lines(of: str) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in documents(of)).encode()


def documents(of: str) -> list[dict]:
    return [{"id": f"{of}-{n}", "text": text, "url": f"https://a.example/{n}"} for n, text in enumerate(texts(of))]


def texts(*of: str) -> list[str]:
    return [f"text {n} of {each}" for each in of for n in range(25)]


def tables(of: str = "") -> dict[str, bytes]:
    """A dataset of two configurations and several splits, in Parquet."""
    files = {f"train/{n}.parquet": parquet(f"file {n}{of}") for n in range(3)}
    return files | {"dev/0.parquet": parquet("dev"), "other.parquet": parquet("other"), "README.md": CARD.encode()}


def test_datasets_are_what_their_files_are(hub, machine):
    first = hub.commit("datasets/me/tables", tables())
    text = hub.commit("datasets/me/lines", {"some.json.gz": gzip.compress(lines("lines"))})
    hub.commit("datasets/me/raw", {"en/a.jsonl": lines("raw")})
    # A folder here that has the name is not what the recipe asks for.
    (machine.folder / "me" / "tables").mkdir(parents=True)
    (machine.folder / "me" / "tables" / "x.jsonl").write_bytes(lines("a decoy"))

    sources = "[{dataset: me/tables, config: tables}, {dataset: me/lines}, 'hf://datasets/me/raw/en/*.jsonl']"
    assert machine.collect(sources, token=TOKEN).returncode == 0
    collected, summary = machine.collected()
    assert sorted(collected) == sorted(texts("file 0", "file 1", "file 2", "lines", "raw"))
    assert summary["commits"] == {"tables": first, "lines": text}
    assert {one.token for one in hub.requests if "/me/" in one.path} == {TOKEN}
    assert {one.token for one in hub.requests if one.apart} == {None}
    written = [path for path in machine.folder.parent.rglob("*") if path.is_file()]
    assert len(written) > 10 and not [path for path in written if TOKEN.encode() in path.read_bytes()]


@pytest.mark.full
def test_a_hub_that_fails_amid_a_dataset_loses_nothing_and_mixes_no_commits(hub, machine):
    hub.commit("datasets/me/large", tables())
    source = "[{dataset: me/large, config: tables}]"
    hub.faults[:] = [Fault("resolve.*train/1.parquet", 503, times=99)]
    told = refusal(machine.collect(source, "data.on_error=skip"))
    assert "me/large/1-of-3" in told and "503" in told
    # After that it breaks off now and then, which is lived through; a new commit is not mixed with the old one.
    commit = hub.commit("datasets/me/large", tables(of=" anew"))
    hub.faults[:] = [Fault("^/[0-9a-f]{64}", cut=1000, times=2), Fault("resolve.*train/2.parquet", 500, times=2)]
    ended = machine.collect(source, "data.on_error=skip")
    assert ended.returncode == 0, ended.stderr
    assert not any(fault.times for fault in hub.faults)
    collected, summary = machine.collected()
    assert collected == texts("file 0 anew", "file 1 anew", "file 2 anew")
    assert not summary["removed"] and summary["commits"] == {"tables": commit}


def test_a_model_that_the_hub_does_not_give_is_refused_in_one_message(hub, machine):
    hub.commit("models/me/closed", {"config.json": b"{}"})
    hub.faults[:] = [Fault("me/closed/resolve", 401, {"X-Error-Code": "GatedRepo"}, times=99)]
    ended = machine.run("import", "me/closed")
    assert f"Accept its terms at {hub.address}/me/closed" in refusal(ended)
    assert not ended.stderr.startswith("\n"), "no bars of progress where there is no terminal"
    for missing in ("me/there-is-no-such-model", "./nowhere"):  # without a network
        assert refused(local_copy, missing, match=missing).fix


def test_a_model_comes_over_a_connection_that_breaks(hub, machine, tmp_path):
    export(replace(tiny_llama(), chat=True), tmp_path / "model", facts=CardFacts("mit"))
    hub.commit("models/me/tiny", tmp_path / "model")
    hub.faults[:] = [Fault("^/[0-9a-f]{64}", cut=1000)]  # once, which is lived through
    assert machine.run("import", "me/tiny", token=TOKEN).returncode == 0
    assert {one.token for one in hub.requests if one.apart} == {None}
