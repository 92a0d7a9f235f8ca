"""Results: complete or not there, whatever kills the process."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from affinage.pipeline.store import Request, Store, read_manifest, read_request
from affinage.results import RESULT, read_json
from run_affinage import run

RECIPES = Path(__file__).parents[1] / "recipes"
REQUEST = Request("filter", 1, {"data": {"filters": {"min_characters": 3}}}, {"ingest": "abc"}, {"a.txt": "1"})


def test_a_result_is_there_once_its_manifest_is_until_it_is_damaged_or_begun_again(tmp_path):
    store = Store(tmp_path)
    folder = store.begin(REQUEST, resume=False)
    (folder / "part").mkdir()
    file = folder / "part/a.bin"
    file.write_bytes(b"abc")
    assert not store.is_complete(REQUEST) and read_request(folder) == REQUEST
    store.finish(REQUEST, {"documents": 3}, started=1e9)
    assert store.is_complete(REQUEST) and read_json(folder / RESULT) == {"documents": 3}
    manifest = read_manifest(folder)
    assert set(manifest["files"]) == {"part/a.bin", "request.json", RESULT}
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["files"]["part/a.bin"] == {"bytes": 3, "sha256": digest}
    assert manifest["step"] == "filter" and manifest["inputs"] == {"ingest": "abc"}
    assert manifest["started"] == "2001-09-09T01:46:40Z"
    store.begin(REQUEST, resume=True)
    store.finish(REQUEST, {"documents": 3}, started=2e9)
    assert read_manifest(folder)["files"] == manifest["files"]  # the same work has the same checksum in the report
    for damage in (lambda: file.write_bytes(b"ab"), file.unlink):
        damage()
        assert "a.bin" in store.damage(REQUEST) and not store.is_complete(REQUEST)
    (folder / "left").touch()
    assert (store.begin(REQUEST, resume=True) / "left").exists()
    assert not (store.begin(REQUEST, resume=False) / "left").exists()


@pytest.mark.parametrize(
    "change", [{"step": "split"}, {"version": 2}, {"settings": {}}, {"inputs": {"ingest": "x"}}, {"sources": {}}]
)
def test_the_key_is_of_everything_in_the_request(change):
    assert replace(REQUEST, **change).key != REQUEST.key
    assert replace(REQUEST, settings=json.loads(json.dumps(REQUEST.settings))).key == REQUEST.key


WRITER = """
import sys
from pathlib import Path
from affinage.pipeline.store import Request, Store
store = Store(Path(sys.argv[1]))
for round in range(10_000):
    request = Request("s", 1, {"round": round}, {}, {})
    folder = store.begin(request, resume=False)
    for name in "abc":
        (folder / name).write_bytes(bytes(50_000))
        if round == 0 and name == "b":
            print("ready", flush=True)
    store.finish(request, {}, started=0)
    if round % 2:
        store.discard(request)
"""


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_killed_at_any_moment_a_manifest_never_names_what_is_not_there(tmp_path, delay):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = Store(tmp_path)
    for folder in tmp_path.glob("s-*"):
        request = read_request(folder)
        if read_manifest(folder):
            assert not store.damage(request), "complete"
            assert (folder / "c").read_bytes() == bytes(50_000)
    store.sweep()
    assert not list(tmp_path.glob(".discarded-*")), "half-deleted results are swept away"


FULL = """
import resource, sys
from affinage.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
main(sys.argv[1:])
"""


def test_a_full_disk_ends_in_one_message_and_the_run_goes_on_later(tmp_path, monkeypatch):
    """Files may not become larger than a limit, which a writer meets as it meets a full disk."""
    text = random.Random(0).randbytes(100_000).hex()
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    command = ["run", str(RECIPES / "tiny.yaml"), "--set", "data.sources=[text.txt]", "--until", "ingest"]
    full = subprocess.run([sys.executable, "-c", FULL, *command], capture_output=True, text=True, timeout=300)
    assert full.returncode == 2, full.stderr
    assert "Make room" in full.stderr and "Traceback" not in full.stderr
    run(*command)
