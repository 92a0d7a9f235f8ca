"""Results: complete or not there, whatever kills the process; and files and URLs whose change is seen."""

import contextlib
import io
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hub_server
import tiny_run
from affinage.config.load import load_recipe
from affinage.downloads import CACHE_VARIABLE
from affinage.errors import UserWarned
from affinage.fingerprints import fingerprints, remote_fingerprints
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.pipeline.step import Step, StepContext
from affinage.pipeline.store import Request, Store, read_manifest, read_request
from affinage.results import RESULT, read_json
from hub_server import Fault, Hub
from run_affinage import refused, run
from waiting import begun, python

REQUEST = Request("filter", 1, {"data": {"filters": {"min_characters": 3}}}, {"ingest": "abc"}, {"a.txt": "1"})


def test_a_result_is_there_once_its_manifest_is_until_it_is_damaged_or_begun_again(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9 + 5.5)  # set back since the work began
    store = Store(tmp_path)
    folder = store.begin(REQUEST, resume=False)
    (folder / "part").mkdir()
    file = folder / "part/a.bin"
    file.write_bytes(b"abc")
    assert not store.is_complete(REQUEST) and read_request(folder) == REQUEST
    assert 5 <= store.finish(REQUEST, {"documents": 3}, started=time.monotonic() - 5) < 5.5
    assert store.is_complete(REQUEST) and read_json(folder / RESULT) == {"documents": 3}
    manifest = read_manifest(folder)
    assert set(manifest["files"]) == {"part/a.bin", "request.json", RESULT}
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["files"]["part/a.bin"] == {"bytes": 3, "sha256": digest}
    assert manifest["step"] == "filter" and manifest["inputs"] == {"ingest": "abc"}
    assert manifest["started"] == "2001-09-09T01:46:40Z"
    store.begin(REQUEST, resume=True)
    store.finish(REQUEST, {"documents": 3}, started=time.monotonic())
    assert read_manifest(folder)["files"] == manifest["files"]
    for damage in (lambda: file.write_bytes(b"ab"), file.unlink):
        damage()
        assert "a.bin" in store.damage(REQUEST) and not store.is_complete(REQUEST)
    (folder / "left").touch()
    assert (store.begin(REQUEST, resume=True) / "left").exists()
    assert not (store.begin(REQUEST, resume=False) / "left").exists()


def test_the_key_is_of_everything_in_the_request():
    for change in ({"step": "split"}, {"version": 2}, {"settings": {}}, {"inputs": {"ingest": "x"}}, {"sources": {}}):
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
    process = begun(WRITER, str(tmp_path))
    time.sleep(delay)
    process.kill()
    process.wait()
    for folder in tmp_path.glob("s-*"):
        if (request := read_request(folder)) and read_manifest(folder):  # a result that is removed loses both marks
            assert not Store(tmp_path).damage(request), "complete"
            assert (folder / "c").read_bytes() == bytes(50_000)


FULL = """
import resource, sys
from affinage.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
main(sys.argv[1:])
"""


def test_a_full_disk_ends_in_one_message_and_the_run_goes_on_later(tmp_path, monkeypatch):
    """Files may not become larger than a limit, which a writer meets as it meets a full disk."""
    (tmp_path / "text.txt").write_text(random.Random(0).randbytes(100_000).hex())
    monkeypatch.chdir(tmp_path)
    command = ["run", str(tiny_run.RECIPE), "--set", "data.sources=[text.txt]", "--until", "ingest"]
    full = python(FULL, *command)
    assert full.returncode == 2, full.stderr
    assert "Make room" in full.stderr and "Traceback" not in full.stderr
    run(*command)


# ---- runs that share a folder


# A road of two stages: what the first makes is the same for all names, and the second is each recipe's own.
RUN = """
import sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/.."]
from test_results_on_disk import runner, ProgressListener
runner(sys.argv[2], held_in=sys.argv[3]).run(ProgressListener())
print("done", flush=True)
"""


def make(context: StepContext) -> dict:
    stage = context.folder.name.partition("-")[0]
    assert all((folder / "text").read_text() == name for name, folder in context.inputs.items())
    with open("made.log", "a") as log:
        log.write(f"{stage} of {context.recipe.name}\n")
    if os.environ.get("HELD_IN") == stage:
        child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        print("ready", flush=True)
        input()
        child.kill()
    (context.folder / "text").write_text(stage)
    return {}


def runner(name: str, held_in: str = "", force: tuple[str, ...] = ()) -> PipelineRunner:
    os.environ["HELD_IN"] = held_in
    road = [Step("shared", make, {}), Step("own", make, {"name": name}, ("shared",))]
    return PipelineRunner(load_recipe("r.yaml", [f"name={name}"]), Path("runs"), road, force=force)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a run in a process of its own, which waits inside of a stage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELD_IN", "")
    Path("r.yaml").write_text("name: r\nmodel: {inputs: [tokens], nodes: {embed: {kind: embedding, in: tokens}}}\n")
    running = []

    def process(name: str, held_in: str) -> subprocess.Popen:
        running.append(begun(RUN, str(Path(__file__).parent), name, held_in, stdin=subprocess.PIPE))
        return running[-1]

    yield process
    for each in running:
        each.kill()
        each.communicate()


class Heard(io.StringIO):
    """A standard output that acts on the first line it gets."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def write(self, text: str) -> int:
        if not self.getvalue() and text.strip():
            self.act()
        return super().write(text)


def test_what_two_runs_need_is_made_by_one_and_waited_for_by_the_other(start):
    first = start("a", "shared")
    with contextlib.redirect_stdout(Heard(lambda: print(file=first.stdin, flush=True))) as said:
        assert list(runner("b").run(ProgressListener())) == ["own"]
    assert said.getvalue().count("\n") == 1 and "shared: waiting" in said.getvalue()
    assert first.stdout.readline() == "done\n"
    assert sorted(Path("made.log").read_text().split("\n")) == ["", "own of a", "own of b", "shared of a"]
    assert os.path.samefile("runs/a/shared", "runs/b/shared")


def test_another_run_goes_on_beside_one_and_a_second_start_of_the_same_is_refused(start):
    first = start("a", "own")
    assert list(runner("b").run(ProgressListener())) == ["own"]
    mistake = refused(lambda: runner("a").run(ProgressListener()))
    assert "runs/a" in str(mistake) and mistake.fix
    assert Path("made.log").read_text() == "shared of a\nown of a\nown of b\n"
    first.kill()  # what it has started outlives it, and holds nothing
    first.wait()
    assert list(runner("a").run(ProgressListener())) == ["own"]
    assert len(runner("b", force=("shared",)).run(ProgressListener())) == 2


def test_what_a_killed_run_was_making_is_made_by_whoever_waited(start):
    first = start("a", "shared")
    with contextlib.redirect_stdout(Heard(first.kill)):
        assert list(runner("b").run(ProgressListener())) == ["shared", "own"]


# ---- what changes outside is seen: files by their content, URLs by what their servers say of them


LARGE = 17_000_000


def test_files_are_known_by_their_content_and_large_ones_by_their_time_too(tmp_path: Path):
    file, other, new = (tmp_path / name for name in ("text.txt", "other.txt", "new.txt"))

    def seen(path: Path) -> str:
        return fingerprints([str(path)])[str(path)]

    for size in (3, 3_000_000, LARGE):
        for each, letter in ((file, b"0"), (other, b"0"), (new, b"1")):
            each.write_bytes(letter * size)
            os.utime(each, (0, 0))
        before = seen(file)
        assert seen(file) == before == seen(other)
        os.utime(other, (9, 9))
        assert (seen(other) == before) is (size < LARGE)
        new.replace(file)
        assert seen(file) != before, "it has another content, of the same size and time"
    (tmp_path / "names").mkdir()
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):  # not UTF-8
        (tmp_path / "names" / os.fsdecode(name)).write_bytes(name)
    assert len(set(fingerprints([str(tmp_path / "names")]).values())) == 2


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A server with one file, whose headers are those of a fault where a test wants others."""
    with hub_server.serving() as hub:
        hub.commit("models/me/files", {"text.txt": b"A text about a river and an old bridge.\n" * 20})
        yield hub


def with_headers(hub: Hub, **headers: str) -> str:
    """The URL of its file."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    hub.faults[:] = [Fault("text.txt", 200, named, times=99)]
    return f"{hub.address}/me/files/resolve/main/text.txt"


def test_a_url_is_known_by_its_etag_or_its_time_and_else_or_without_an_answer_as_before(hub: Hub):
    for etag in ({"ETag": '"1"'}, {}):
        url = with_headers(hub, **etag, Last_Modified="Mon")
        before = remote_fingerprints([url], {})
        assert remote_fingerprints([url], {"else": "x"}) == before
        with_headers(hub, **({"ETag": '"2"', "Last_Modified": "Mon"} if etag else {"Last_Modified": "Tue"}))
        assert remote_fingerprints([url], before) != before
    with_headers(hub)
    with pytest.warns(UserWarned, match="no version"):
        assert remote_fingerprints([url], {url: "former"}) == {url: "former"}
    nobody = "http://127.0.0.1:9/text.txt"
    with pytest.warns(UserWarned, match="cannot check whether"):
        assert remote_fingerprints([nobody], {nobody: "former"}) == {nobody: "former"}


def test_a_changed_url_is_fetched_again_and_so_is_any_by_force(hub: Hub, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    url = f"{hub.address}/me/files/resolve/main/text.txt"

    def ingest(*words: str) -> bytes:
        """The text."""
        settings = [f"data.sources=['{url}']"]
        run("run", tiny_run.RECIPE, "--until", "ingest", "--runs", tmp_path / "runs", *words, settings=settings)
        [file] = (tmp_path / "runs/tiny/ingest").rglob("*.parquet")
        return file.read_bytes()

    ingest()
    hub.requests.clear()
    ingest()
    assert len(hub.requests) == 1 and "Nothing to do" in capsys.readouterr().out
    hub.commit("models/me/files", {"text.txt": b"Another text about the same river.\n" * 20})
    assert b"Another text" in ingest() and "files changed" in capsys.readouterr().out
    with_headers(hub)  # and another text
    with pytest.warns(UserWarned, match=f"cannot check whether {url} has changed"):
        ingest()
    assert "Nothing to do" in capsys.readouterr().out and b"it does not work" in ingest("--force", "ingest")
