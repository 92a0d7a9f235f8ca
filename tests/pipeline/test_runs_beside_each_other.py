"""Runs that share a folder: what both need is made once, and nothing is taken from under the other."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.pipeline.step import Step, StepContext

# A road of two stages: what the first makes is the same for all names, and the second is each recipe's own.
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from test_runs_beside_each_other import runner, ProgressListener
runner(sys.argv[2], held_in=sys.argv[3]).run(ProgressListener())
print("done", flush=True)
"""


def shared(context: StepContext) -> dict:
    return _made(context)


def own(context: StepContext) -> dict:
    assert (context.inputs["shared"] / "text").read_text() == "shared"
    return _made(context)


def _made(context: StepContext) -> dict:
    stage = context.folder.name.partition("-")[0]
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
    road = [Step("shared", shared, {}), Step("own", own, {"name": name}, ("shared",))]
    return PipelineRunner(load_recipe("r.yaml", [f"name={name}"]), Path("runs"), road, force=force)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a run in a process of its own, which waits inside of a stage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELD_IN", "")
    Path("r.yaml").write_text("name: r\nmodel: {inputs: [tokens], nodes: {embed: {kind: embedding, in: tokens}}}\n")
    running = []

    def process(name: str, held_in: str) -> subprocess.Popen:
        command = [sys.executable, "-c", RUN, str(Path(__file__).parent), name, held_in]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout.readline() == "ready\n"
        return running[-1]

    yield process
    for each in running:
        each.kill()
        each.communicate()


def made() -> list[str]:
    return Path("made.log").read_text().splitlines()


class Heard(io.StringIO):
    """A standard output that acts on the first line it gets."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def write(self, text: str) -> int:
        if not self.getvalue() and text.strip():
            self.act()
        return super().write(text)


def go_on(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_what_two_runs_need_is_made_by_one_and_waited_for_by_the_other(start):
    first = start("a", "shared")
    with contextlib.redirect_stdout(Heard(lambda: go_on(first))) as said:
        assert list(runner("b").run(ProgressListener())) == ["own"]
    assert said.getvalue().count("\n") == 1 and "shared: waiting" in said.getvalue()
    assert first.stdout.readline() == "done\n"
    assert sorted(made()) == ["own of a", "own of b", "shared of a"]
    assert os.path.samefile("runs/a/shared", "runs/b/shared")


def test_another_run_goes_on_beside_one_and_a_second_start_of_the_same_is_refused(start):
    first = start("a", "own")
    assert list(runner("b").run(ProgressListener())) == ["own"]
    with pytest.raises(UserError) as refused:
        runner("a").run(ProgressListener())
    assert "runs/a" in str(refused.value) and refused.value.fix
    assert made() == ["shared of a", "own of a", "own of b"]

    first.send_signal(signal.SIGKILL)  # what it has started outlives it, and holds nothing
    first.wait()
    assert list(runner("a").run(ProgressListener())) == ["own"]
    assert len(runner("b", force=("shared",)).run(ProgressListener())) == 2


def test_one_that_begins_at_the_same_time_and_is_refused_takes_nothing_from_the_other(start, monkeypatch):
    second = runner("a")
    plan = second.plan
    monkeypatch.setattr(second, "plan", lambda: start("a", "shared") and plan())
    with pytest.raises(UserError):
        second.run(ProgressListener())
    assert {entry.name for entry in Path("runs/a").iterdir()} == {"recipe.json", "run.json"}


def test_what_a_killed_run_was_making_is_made_by_whoever_waited(start):
    first = start("a", "shared")
    with contextlib.redirect_stdout(Heard(first.kill)):
        assert list(runner("b").run(ProgressListener())) == ["shared", "own"]
