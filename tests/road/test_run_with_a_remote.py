"""A run on machines whose disks vanish: the next one takes results and the training from where they were copied to."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from fnmatch import filter as fnfilter
from pathlib import Path

import pytest

import run_affinage
import tiny
import tiny_run
from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import RemoteFolder, download
from affinage.checkpoint.store import COMMIT
from affinage.cluster.launch import cpu_devices, reserved_port
from affinage.cluster.processes import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from waiting import until

SECRETS = {"WANDB_API_KEY": "a-key-of-weights-and-biases", "HF_TOKEN": "a-token", "GITHUB_TOKEN": "anothers-token"}
SETTINGS = ["data.sources=[{path: pocket-world, max_bytes: 0.05MB}]", "sft=null", "evaluate=null", "export=null"]


def run(runs: Path, remote: str, *words: str, status: int = 0) -> None:
    settings = (*SETTINGS, f"runtime.remote={remote}")
    run_affinage.run("run", tiny_run.RECIPE, "--runs", runs, *words, settings=settings, status=status)


def test_an_empty_machine_goes_on_from_the_copy_and_nothing_anywhere_has_a_secret(tmp_path, capfd, monkeypatch):
    url, save = f"memory://{tmp_path}/copies", CheckpointStore.save

    def saved_and_copied(store: CheckpointStore, step: int, *given: object) -> None:
        """Steps that come while another is copied are passed over: which ones hangs on the machine."""
        save(store, step, *given)
        store.wait()
        until(lambda: any(name.endswith(f"checkpoints/{step}/{COMMIT}") for name in RemoteFolder(url).sizes()))

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CheckpointStore, "save", saved_and_copied)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run(first, url)
    marks = fnfilter(RemoteFolder(url).sizes(), f"pretrain-*/checkpoints/??/{COMMIT}")
    assert [name.split("/")[2] for name in marks] == ["15", "20"]
    RemoteFolder(url).remove(marks[1:])  # as if the machine had been taken away in the midst of the last save
    for step in ("pretrain", "report"):
        RemoteFolder(url).remove(fnfilter(RemoteFolder(url).sizes(), f"{step}-*/manifest.json"))
    said = capfd.readouterr()

    run(second, url)
    again = capfd.readouterr()
    assert f"copying step 15 from {url}" in again.out
    run(third, url)  # there is nothing left to do, but to bring it here
    for place in ("pretrain/summary.json", "report.html", "pretrain/checkpoints/20/_CHECKPOINT_METADATA"):
        assert (third / "tiny" / place).read_bytes() == (second / "tiny" / place).read_bytes()
    found = [json.loads((runs / "tiny/pretrain/summary.json").read_text()) for runs in (first, second)]
    assert [summary["resumed_at"] for summary in found] == [[], [15]]
    curves = [tiny.curve(runs / "tiny/pretrain") for runs in (first, second)]
    assert curves[0] == curves[1] and curves[0][-1]["step"] == 20
    assert download(f"{url}/{marks[0].partition('/')[0]}", tmp_path / "copy", print) == [20, 15]

    remote = RemoteFolder(url)
    kept = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept |= {name: remote.read(name) or b"" for name in remote.sizes()}
    kept |= {"said": (said.out + said.err + again.out + again.err).encode()}
    for secret in SECRETS.values():
        assert [name for name, contents in kept.items() if secret.encode() in contents] == []


@pytest.mark.parametrize("wrong", ["/a/folder", "s3://key:hunter2@bucket/x", "s3://bucket/x?token=hunter2"])
def test_a_remote_that_is_none_or_has_a_secret_in_it_is_refused(tmp_path: Path, wrong: str, capfd):
    run(tmp_path, wrong, status=2)
    said = capfd.readouterr().err
    assert "--set runtime.remote" in said and "hunter2" not in said


def test_a_result_that_is_damaged_there_is_not_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    url, until = f"memory://{tmp_path}/copies", ("--until", "train-tokenizer")
    remote = RemoteFolder(url)
    run(tmp_path / "first", url, *until)
    name = fnfilter(remote.sizes(), "split-*.parquet")[0]
    contents = bytearray(remote.read(name) or b"")
    contents[len(contents) // 2] ^= 1
    remote.write(name, bytes(contents))
    remote.remove(fnfilter(remote.sizes(), "train-tokenizer-*/manifest.json"))
    run(tmp_path / "second", url, *until, status=2)
    assert Path(name).name in capfd.readouterr().err
    remote.remove([f"{name.partition('/')[0]}/manifest.json"])
    run(tmp_path / "second", url, *until)  # made again, from what is whole
    places = [tmp_path / runs / "tiny/train-tokenizer/tokenizer.model" for runs in ("first", "second")]
    assert places[0].read_bytes() == places[1].read_bytes()

    marks = list((tmp_path / "second").rglob("copied.txt"))
    for mark in marks:
        mark.unlink()
    remote.remove([name])
    run(tmp_path / "second", url, *until)
    assert all(mark.is_file() for mark in marks) and remote.read(name) is None, "what is there is not copied again"


@pytest.mark.full
def test_processes_that_share_no_disk_train_together_by_way_of_gs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import object_stores

    words = run_affinage.set_words(*SETTINGS, "mesh={data: 2}", "pretrain.steps=6")
    with object_stores.bucket("gs", monkeypatch) as url_of:
        held, address = reserved_port()
        both = []
        for index in range(2):
            place = {COORDINATOR: address, NUM_PROCESSES: "2", PROCESS_ID: str(index)} | cpu_devices(1)
            command = ["run", str(tiny_run.RECIPE), "--until", "pretrain", "--runs", str(tmp_path / str(index)), *words]
            command += ["--set", f"runtime.remote={url_of('copies')}"]
            both.append(subprocess.Popen([sys.executable, "-m", "affinage", *command], env=os.environ | place))
        with held:
            assert [process.wait(500) for process in both] == [0, 0]
        saved = {name.split("/")[2] for name in RemoteFolder(url_of("copies")).sizes() if "/checkpoints/" in name}
    [training] = (tmp_path / "0" / "store").glob("pretrain-*")
    assert saved == {"5", "6"} == {path.name for path in (training / "checkpoints").iterdir()}
    assert not CheckpointStore(training / "checkpoints").verify(6)
    assert not (tmp_path / "1" / "store" / training.name / "checkpoints").exists()


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "affinage", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def done(runs: Path) -> dict[str, str]:
    """What each complete result says of itself, and so when it was made."""
    return {path.parent.name: path.read_text() for path in (runs / "store").glob("*/manifest.json")}


def test_killed_while_it_trains_it_ends_with_the_same_bits(tiny_runs: Path, own_runs: Path):
    """Among the preferences, of the run that all tests share; what was made before is not made again."""
    for stage in ("ref-logprobs", "dpo"):
        shutil.rmtree((own_runs / "tiny" / stage).resolve())
    words = ["run", *tiny_run.WORDS, "--runs", str(own_runs), "--until", "dpo"]
    process, saved = start(*words), "store/dpo-*/checkpoints/2/commit_success.txt"
    until(lambda: list(own_runs.glob(saved)) or process.poll() is not None, 550)
    process.kill()
    told, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, told
    before = done(own_runs)
    run_affinage.run(*words)
    assert before.items() <= done(own_runs).items() and not any(name.startswith("dpo") for name in before)
    assert json.loads((own_runs / "tiny/dpo/summary.json").read_text())["resumed_at"]
    assert tiny.saved_bits(own_runs / "tiny/dpo", 4) == tiny.saved_bits(tiny_runs / "tiny/dpo", 4)


@pytest.mark.full
def test_ten_kills_at_random_moments_change_nothing(tiny_runs: Path, tmp_path: Path):
    killed, draw, died_at_work = tmp_path / "runs", random.Random(0), 0
    words = ["run", *tiny_run.WORDS, "--runs", str(killed)]
    for _ in range(10):
        process = start(*words)
        # A few lines of progress and a moment more: random places in the work, however fast the machine is.
        for _ in range(draw.randint(0, 4)):
            process.stdout.readline()
        time.sleep(draw.uniform(0, 0.5))
        died_at_work += process.poll() is None
        process.kill()
        process.communicate()
    assert died_at_work >= 5  # the others had come to the end
    run_affinage.run(*words)
    for name in ("model.safetensors", "tokenizer.json"):
        ours, theirs = (runs / "tiny/export/model" / name for runs in (killed, tiny_runs))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert tiny.saved_bits(killed / "tiny/dpo", 4) == tiny.saved_bits(tiny_runs / "tiny/dpo", 4)
