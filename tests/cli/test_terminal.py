"""What people and programs meet at the terminal: pipes, signals, completion, live lines, and what is imported."""

import ast
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from affinage.cli.watch import headline
from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR
from affinage.hardware.devices import accelerator_is_here
from affinage.results import RESULTS, IngestResult, SplitResult

PROGRAM = [sys.executable, "-m", "affinage"]
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
DOCS = Path(__file__).parents[2] / "docs" / "terminal.md"


def test_every_status_is_in_the_docs():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.MULTILINE)}
    assert documented == {0, 1, EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED}


def test_a_full_disk_is_a_mistake_and_a_closed_pipe_is_none():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, "config", "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert ended.returncode == 2 and "no space left on device" in ended.stderr and "Traceback" not in ended.stderr
    process = subprocess.Popen(
        [*PROGRAM, "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said and "BrokenPipe" not in said


@pytest.mark.parametrize(
    ("words", "begun", "told", "status"),
    [
        (["world", "mine", "--megabytes", "200"], "mine", signal.SIGINT, EXIT_INTERRUPTED),
        pytest.param(
            ["data", TINY, "--set", "data.sources=[{path: pocket-world, max_bytes: 60MB}]"],
            "runs/store/synthesize-*/request.json",
            signal.SIGTERM,
            EXIT_PREEMPTED,
            marks=pytest.mark.full,
        ),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_a_verb_with_its_status(tmp_path: Path, words, begun, told, status):
    started = subprocess.Popen([*PROGRAM, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while not list(tmp_path.glob(begun)):
        assert time.monotonic() < until and started.poll() is None
        time.sleep(0.02)
    started.send_signal(told)
    _, said = started.communicate(timeout=300)
    assert started.returncode == status and "Traceback" not in said
    if told == signal.SIGINT:
        assert not list(tmp_path.iterdir()), "an interrupted world leaves nothing behind"
    else:
        assert "Run the same command to resume." in said


LEFT, UP = b"\x1b[D", b"\x1b[A"
READ = """
import pathlib, sys
from affinage.cli.chat import read_line
pathlib.Path(sys.argv[1]).write_text(repr([read_line() for _ in range(3)]))
"""


def test_arrow_keys_edit_a_line_of_a_chat_and_bring_back_those_before_it(tmp_path: Path):
    ours, theirs = pty.openpty()
    read = tmp_path / "read"
    command = [sys.executable, "-c", READ, str(read)]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    for number, typed in enumerate((b"bonjur" + 2 * LEFT + b"o", b"salut", 2 * UP + b" !"), start=1):
        while shown.count(b"> ") < number:
            shown += os.read(ours, 1000)
        os.write(ours, typed + b"\r")
    try:
        while os.read(ours, 1000):
            pass
    except OSError:  # Linux says so when the other side has gone
        os.close(ours)
    assert process.wait(300) == 0
    assert read.read_text() == "['bonjour', 'salut', 'bonjour !']"


MANY = {"too short": 1200, "other language": 30, "binary": 7, "empty": 2, "too long": 1}
QUIZ, OTHER = {"items": 10_000, "found": 12}, {"items": 50, "found": 0}
ACC, NORM = {"value": 0.45, "stderr": 0.114}, {"value": 0.3, "stderr": 0.01}
TASKS = {"arc_easy": {"metrics": {"acc": ACC}}, "hellaswag": {"metrics": {"acc": ACC, "acc_norm": NORM}}}


@pytest.mark.parametrize(
    ("step", "result", "lines"),
    [
        ("filter", {"documents_out": 5, "removed": {}}, ["5 documents"]),
        (
            "filter",
            {"documents_in": 5000, "documents_out": 3760, "removed": MANY},
            ["3,760 documents", "removed: 1,200 too short, 30 other language, 7 binary and 2 more"],
        ),
        (
            "decontaminate",
            {"documents_out": 9, "benchmarks": {"quiz": QUIZ, "other": OTHER}},
            ["9 documents", "benchmark items found: 12 of 10,000 of quiz"],
        ),
        ("sft", {"parameters": {"total": 1000}, "final_loss": 4.97}, ["1,000 parameters", "loss 4.970"]),
        ("tokenize", {"train": {"rows": 1000}, "context": 64}, ["1,000 rows"]),
        ("evaluate-sft", {"tasks": TASKS}, ["2 benchmarks", "arc_easy 45.0 ± 11.4", "hellaswag 30.0 ± 1.0"]),
    ],
)
def test_the_facts_that_a_person_wants_to_see_while_waiting(step: str, result: dict, lines: list[str]):
    assert list(headline(RESULTS[step].model_validate(result))) == lines


def test_groups_without_held_out_documents_and_samples_are_named():
    assert "a, b, c and 1 more" in " ".join(headline(SplitResult(without_validation=["a", "b", "c", "d"])))
    assert "7 not in the sample" in " ".join(headline(IngestResult(not_sampled=7)))


IMPORTED = f"""
import os, sys
from affinage.cli import main
def run(*words):
    try: main(list(words))
    except SystemExit: return [name for name in sys.argv[1:] if name in sys.modules]
told = {{"--help": run("--help"), "modules": len(sys.modules), "data": run("data", {TINY!r}, "--dry-run")}}
told["wrong"] = run("plan", "quickstrat", "--on", "v4-8") + run("plan", "quickstart", "--on", "v9-8")
told["no model"] = run("chat", "nobody") + run("serve", "nobody") + run("checkpoint", "show", "nobody")
told["no run"] = run("eval", "quickstart", "--tasks", "x") + run("compare", "a", "b") + run("report", "quickstart")
sys.modules |= dict.fromkeys(["libtpu", "jax_cuda12_plugin"])  # importing them is an ImportError
told["plan"] = run("plan", "quickstart", "--on", "v4-8", "--set", "mesh.data=4")
told["platforms"] = os.environ.get("JAX_PLATFORMS")
print(told, file=sys.stderr)
"""


@pytest.mark.skipif(accelerator_is_here(), reason="JAX then looks for what is here")
def test_nothing_heavy_is_imported_before_it_is_needed_and_no_tpu_is_looked_for(tmp_path: Path):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    heavy = ["jax", "numpy", "pyarrow", "pydantic", "lm_eval", "transformers", "torch"]
    command = [sys.executable, "-c", IMPORTED, *heavy]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    told = ast.literal_eval(shown.stderr.splitlines()[-1])
    assert told.pop("--help") == [] and told.pop("modules") < 500
    assert told.pop("platforms") == "cpu" and "jax" in told.pop("plan") and "quickstart on v4-8" in shown.stdout
    assert not [words for words, found in told.items() if "jax" in found], "mistakes are told before JAX is imported"
