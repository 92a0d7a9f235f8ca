"""No wait without an end, unless somebody has thought about who watches, or why it ends."""

import ast
from pathlib import Path

import affinage

WATCHED = "told with all stacks by who looks on (training.watchdog, hardware.standstill), and left where that helps"
OURS = "our own method of that name, whose waits stand in its file"
ASKED = "a thread that has nothing to do until it is asked, and keeps nobody"
THERE = "what it takes was said to be there"
ANSWERED = "whoever is to answer answers in any case"
REASONS = {  # file -> how many such waits it has, and why each is well
    "checkpoint/contents.py": (3, f"{WATCHED}; reads small files of a disk"),
    "checkpoint/mirror.py": (1, ASKED),
    "checkpoint/memory.py": (1, "a thread that was told to end"),
    "checkpoint/store.py": (7, f"{WATCHED}; Orbax has seconds_at_most for a save"),
    "cli/doctor.py": (1, "the question has a limit"),
    "data/ahead.py": (2, WATCHED),
    "data/downloads.py": (1, f"another download of the same file, which ends or is told itself; {WATCHED}"),
    "data/pool.py": (1, WATCHED),
    "data/ray_engine.py": (1, WATCHED),
    "generation/decode.py": (2, "no wait: the words so far"),
    "generation/engine.py": (3, f"{ASKED}; its step ends; the words so far"),
    "hardware/cloud.py": (1, f"{OURS}: wait_hours"),
    "hardware/links.py": (2, THERE),
    "hardware/silence.py": (1, "asked not to wait"),
    "launch/forked.py": (1, THERE),
    "launch/process.py": (1, "the thread says how its start went, whatever it was"),
    "launch/ray.py": (1, THERE),
    "launch/rented.py": (1, f"{OURS}: wait_hours"),
    "launch/zygote.py": (2, f"{THERE}; what was killed with SIGKILL"),
    "planning/compiled.py": (2, "a compiler takes what it takes, before a person; and our own `acquire`"),
    "planning/layouts.py": (1, "a compiler takes what it takes, before a person"),
    "serving/running.py": (2, "it serves until it is told to stop; the other has the grace"),
    "serving/server.py": (3, f"{ANSWERED}, also at its own end; who waits for `idle` has a limit"),
    "stages/flow.py": (1, f"{OURS}: gives up when no file arrives"),
    "stages/imports.py": (1, OURS),
    "stages/preferences.py": (1, OURS),
    "stages/remote_results.py": (1, ASKED),
    "stages/watching.py": (1, OURS),
    "stopping.py": (1, ASKED),
    "tracking/__main__.py": (1, "a process that has nothing to do until it is asked, and ends with who asks"),
    "training/frozen.py": (1, OURS),
    "training/loop.py": (4, f"{OURS}: {WATCHED}"),
}


def has_no_limit(call: ast.Call) -> bool:
    """Whether this is a call of something that waits, and says no seconds."""
    for word in call.keywords:
        if word.arg == "timeout":
            return any(isinstance(part, ast.Constant) and part.value is None for part in ast.walk(word.value))
    function, given = ast.unparse(call.func), len(call.args) + len(call.keywords)
    match function.rpartition(".")[2]:
        case "wait" | "join" | "result" | "acquire":
            return "." in function and not given
        case "get":
            return "." in function and (not given or function.endswith("ray.get"))
        case "wait_for":
            return given < 2
        case "flock" | "lockf":
            return not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN"))
        case "waitpid":
            return ast.unparse(call.args[1]) == "0"
        case "select":
            return function == "select.select" and given < 4
        case "communicate" | "recv" | "recv_into" | "accept":
            return "." in function
    return function in ("subprocess.run", "subprocess.check_output", "subprocess.check_call")


def test_every_wait_has_a_limit_or_a_reason():
    source = Path(affinage.__file__).parent
    for path in sorted(source.rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
        found = [f"line {call.lineno}: {ast.unparse(call)}" for call in calls if has_no_limit(call)]
        allowed, _ = REASONS.get(file := path.relative_to(source).as_posix(), (0, ""))
        assert len(found) == allowed, "\n".join([f"{file} waits without a limit: give one, or a reason here", *found])
    assert all((source / file).is_file() for file in REASONS)
