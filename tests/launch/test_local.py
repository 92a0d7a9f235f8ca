"""Hosts that are processes of this machine: started, told of a mistake, ended with whoever started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from affinage.launch import LocalLauncher, Restarts, supervise
from affinage.launch.forked import ForkedProcess, Forks
from affinage.launch.process import HostProcess, reserved_port, start_all
from waiting import until

TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
SCRIPT = """
import os, signal, sys, time
def saved(number, frame):
    print("saved", flush=True)
    sys.exit(75)
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, saved)
    print("waits", flush=True)
    time.sleep(600)
print(__name__, sys.argv[1:], os.environ.get("GIVEN"), os.getcwd(), os.getsid(0) == os.getpid(), flush=True)
sys.exit(3)
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_mistake_that_the_hosts_of_a_launch_find_ends_it_with_one_message_and_status_2(own_runs: Path):
    said: list[str] = []
    command = ["run", str(TINY), "--until", "pretrain", "--runs", str(own_runs), "--set", "mesh={data: 3}"]
    launcher = LocalLauncher(2, devices=1, say=said.append)
    assert supervise(launcher, [*command, "--set", "pretrain.steps=3"], Restarts(), say=said.append) == 2, said
    [mistake] = [line for line in said if "Error: " in line]
    assert mistake.startswith("0 | ") and "data 3 makes 3 devices, but there are 2" in mistake
    assert not any("Check failure" in line or "Traceback" in line for line in said), said


HOST = """
import os, signal, sys, time
from affinage.errors import Preempted
from affinage.hardware import joining
from affinage.stopping import OwnProcess, leave, left_when_done

class Links(joining.Links):
    def __init__(self, *given):
        super().__init__(*given)
        while not self.complete:
            time.sleep(0.01)

joining.Links = Links
with left_when_done():
    try:
        with OwnProcess(), joining.joined() as hosts:
            hosts.meet("the beginning")
            if hosts.first:
                {first}
            {second}
    except Preempted:
        sys.exit(75)
"""
WAITS = 'hosts.meet("the end", seconds=300)'
TOLD = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(300)"
LEAVES, STOPS = 'leave("told while in native code")', 'raise Preempted("told to stop")'


@pytest.mark.parametrize(
    ("first", "second", "statuses"),
    [
        (TOLD, WAITS, [75, 75]),
        pytest.param(WAITS, TOLD, [75, 75], marks=pytest.mark.full),
        pytest.param(STOPS, LEAVES, [75, 75], marks=pytest.mark.full),
        pytest.param(LEAVES, STOPS, [75, 75], marks=pytest.mark.full),
        (WAITS, 'raise ValueError("an error of ours")', [1, 1]),
    ],
    ids=["the first is told", "the second is told", "the second leaves", "the first leaves", "an error"],
)
def test_no_host_waits_for_one_that_has_left(warm_python: list[str], first: str, second: str, statuses: list[int]):
    held, address = reserved_port()
    hosts = []
    for host in range(2):
        place = {"AFFINAGE_COORDINATOR": address, "AFFINAGE_HOSTS": "2", "AFFINAGE_HOST": str(host)}
        command = [*warm_python, "-c", HOST.format(first=first, second=second)]
        hosts.append(subprocess.Popen(command, env={**os.environ, **place}, text=True, stderr=subprocess.PIPE))
    with held:
        said = [host.communicate(timeout=300)[1] for host in hosts]
    assert [host.returncode for host in hosts] == statuses, said
    assert not any("Check failure" in each for each in said), said
    if TOLD in (first, second):  # the other one leaves with one line
        [other] = [each for each, does in zip(said, (first, second)) if does == WAITS]
        assert len(other.splitlines()) <= 2 and "was told to stop" in other, other


def test_none_is_left_where_not_all_can_be_started(tmp_path: Path):
    begun: list[HostProcess] = []

    def starts() -> Iterator[HostProcess]:
        begun.append(HostProcess(["sleep", "60"]))
        yield begun[0]
        yield HostProcess([str(tmp_path / "nothing")])

    with pytest.raises(FileNotFoundError):
        start_all(starts())
    assert not alive(begun[0].pid)


def test_hosts_die_with_who_started_them():
    host = "import time; from affinage.stopping import die_with_parent; die_with_parent(); time.sleep(600)"
    code = (
        "import time\nfrom affinage.launch.process import HostProcess\n"
        f"print(HostProcess({[sys.executable, '-c', host]!r}).pid, flush=True)\ntime.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    until(lambda: not alive(pid))


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    far = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    far.mkdir()
    made = Forks(far / "zygote", os.environ, signal.SIGKILL, 60.0, ["json"])
    yield made
    made.leave()


def test_what_is_forked_is_as_if_python_had_started_it(forks: Forks, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def result(process: ForkedProcess) -> tuple[list[str], int | None]:
        lines, ended = [], []

        def over() -> bool:
            more, status = process.news(0.5)
            lines.extend(more)
            ended.append(status)
            return status is not None

        until(over)
        process.end()
        return lines, ended[-1]

    process = forks.start([str(script), "look"], {**os.environ, "GIVEN": "one"})
    assert result(process) == ([f"__main__ ['look'] one {os.getcwd()} True"], 3)
    process = forks.start([str(script), "wait"], os.environ)
    until(lambda: "waits" in process.news(0.5)[0])
    process.tell(signal.SIGTERM)
    assert result(process) == (["saved"], 75)
    process = forks.start([str(script), "wait"], os.environ)
    pid = process.pid
    process.end()
    assert not alive(pid) and process.status() == -signal.SIGKILL
    process = forks.start([str(script), "wait"], os.environ)
    pid = process.pid
    os.kill(parent(pid), signal.SIGKILL)
    assert result(process)[1] == -signal.SIGKILL
    until(lambda: not alive(pid))
    lines, status = result(forks.start(["-m", "no_such_module"], os.environ))  # from another one
    assert status == 1 and "no_such_module" in "".join(lines)
