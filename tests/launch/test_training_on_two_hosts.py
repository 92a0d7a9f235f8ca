"""Two processes that train one model: with the numbers of one, and told to stop, killed or stuck it goes on with them.

Each of the processes has half of the devices; they compute together by `jax.distributed` and Gloo.
"""

import json
import signal
from pathlib import Path

import pytest
from endings import endings
from training_host import Training, ended_alike

from affinage.errors import EXIT_PREEMPTED
from affinage.launch import Restarts, supervise

STEPS = 12
NEVER = Restarts(preemptions=0, failures=0)


def trained(launcher: Training, restarts: Restarts = NEVER) -> int:
    return supervise(launcher, [], restarts, say=launcher.said.append)


@pytest.fixture(scope="module")
def alone(warm_python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by one process with all devices."""
    launcher = Training(warm_python, tmp_path_factory.mktemp("alone") / "run", STEPS, hosts=1)
    assert trained(launcher) == 0, "\n".join(launcher.said)
    return launcher.folder


def test_two_hosts_train_to_the_bits_of_one_and_save_when_one_is_told_to_stop_and_end_when_one_is_killed(
    warm_python: list[str], alone: Path, tmp_path: Path
):
    launcher = Training(
        warm_python, tmp_path / "run", STEPS, hurts=[(1, 2, int(signal.SIGTERM)), (0, 7, int(signal.SIGKILL))]
    )
    assert trained(launcher) == EXIT_PREEMPTED, "\n".join(launcher.said)
    made = launcher.made(0, 0)
    assert launcher.made(0, 1) == made and launcher.saved() == [made[-1]]
    assert trained(launcher) == 1  # it is killed, and nothing is left of the other one
    assert any("host 0 was killed by SIGKILL" in line for line in launcher.said), "\n".join(launcher.said)
    assert launcher.made(1, 0)[0] == made[-1] + 1 and launcher.saved()[-1] >= made[-1]
    assert trained(launcher) == 0, "\n".join(launcher.said)
    assert ended_alike(launcher.folder, alone, STEPS)
    assert launcher.made(2, 0) == launcher.made(2, 1) and launcher.made(2, 0)[-1] == STEPS


@pytest.mark.full
def test_hosts_that_are_killed_again_and_again_change_no_bit(warm_python: list[str], alone: Path, tmp_path: Path):
    hurts = [(step % 2, step, int(signal.SIGKILL)) for step in (1, 4, 6, 7, 10, 12)]
    launcher = Training(warm_python, tmp_path / "run", STEPS, hurts=hurts)
    assert trained(launcher, Restarts(preemptions=0, failures=len(hurts) - 1)) == 1, "\n".join(launcher.said)
    launcher.hosts = 1  # another number of hosts
    assert trained(launcher) == 0, "\n".join(launcher.said)
    assert launcher.starts == len(hurts) + 1 and ended_alike(launcher.folder, alone, STEPS)


@pytest.mark.full
@pytest.mark.parametrize("by", ["sleep", int(signal.SIGSTOP)], ids=["asleep", "stopped"])
def test_a_host_that_stands_still_is_named_and_the_run_goes_on(
    warm_python: list[str], alone: Path, tmp_path: Path, by: int | str
):
    launcher = Training(warm_python, tmp_path / "run", STEPS, hurts=[(1, 6, by)], runtime={"hang_timeout": 4})
    assert trained(launcher, Restarts(preemptions=9, failures=2)) == 0, "\n".join(launcher.said)
    assert "host 1" in (launcher.folder / "stuck.txt").read_text()
    assert ended_alike(launcher.folder, alone, STEPS)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_batch_that_is_not_finite_on_one_host_is_judged_alike_by_all(
    warm_python: list[str], tmp_path: Path, policy: str
):
    done, folders = [], []
    for hosts in (1, 2):
        settings = {"health": {"on_nonfinite": policy}}
        launcher = Training(warm_python, tmp_path / f"{hosts}", STEPS, hosts, sick=[8], settings=settings)
        assert trained(launcher) == 0, "\n".join(launcher.said)
        events = [json.loads(line) for line in (launcher.folder / "health.jsonl").read_text().splitlines()]
        done.append([(event["step"], event["done"]) for event in events])
        folders.append(launcher.folder)
    assert done[0] == done[1] == [(8, "skipped" if policy == "skip" else "rewound to 5")]
    assert ended_alike(*folders, STEPS)
    assert launcher.made(0, 0) == launcher.made(0, 1)


@pytest.mark.full
def test_nobody_waits_for_a_dead_host_where_nothing_watches_over_them(warm_python: list[str], tmp_path: Path):
    for host in (0, 1):
        launcher = Training(warm_python, tmp_path / f"run-{host}", 10**6, hurts=[(host, 3, int(signal.SIGKILL))])
        gang = launcher.start([])
        try:
            found = endings(gang, 2)
        finally:
            gang.end()
        statuses = {ending.host: ending.status for ending in found}
        assert statuses[host] == -signal.SIGKILL and statuses[1 - host] != 0, "\n".join(launcher.said)
