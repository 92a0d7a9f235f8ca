"""Two processes that train one model: with the bits of one; preempted, killed or stopped, the run continues.

Each of them has half of the devices; they compute together by `jax.distributed` and Gloo.
"""

import json
import signal
from pathlib import Path

import pytest
from training_process import Training, ended_alike

STEPS = 12


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by one process with all devices."""
    launcher = Training(tmp_path_factory.mktemp("alone") / "run", STEPS, workers=1)
    assert launcher.run() == 0, "\n".join(launcher.said)
    return launcher.folder


def test_two_processes_save_when_one_is_preempted_start_again_and_end_with_the_bits_of_one(alone: Path, tmp_path: Path):
    launcher = Training(tmp_path / "run", STEPS, hurts=[(1, 2, int(signal.SIGTERM))])
    assert launcher.run() == 0, "\n".join(launcher.said)
    assert any(line.endswith("was preempted, or hung; all start again (0 of 0 failures)") for line in launcher.said)
    made = launcher.made(0, 0)
    assert launcher.made(0, 1) == made and len(made) < STEPS
    assert launcher.made(1, 0) == launcher.made(1, 1) == list(range(made[-1] + 1, STEPS + 1))
    assert ended_alike(launcher.folder, alone, STEPS)


@pytest.mark.full
def test_processes_that_are_killed_again_and_again_change_no_bit(alone: Path, tmp_path: Path):
    hurts = [(step % 2, step, int(signal.SIGKILL)) for step in (1, 6, 7, 12)]
    launcher = Training(tmp_path / "run", STEPS, hurts=hurts)
    assert launcher.run(failures=len(hurts) - 1) == 1, "\n".join(launcher.said)
    assert any("worker 0 was killed by SIGKILL; all start again" in line for line in launcher.said)
    launcher.workers = 1  # another number of processes
    assert launcher.run() == 0, "\n".join(launcher.said)
    assert launcher.starts == len(hurts) + 1 and ended_alike(launcher.folder, alone, STEPS)


@pytest.mark.full
@pytest.mark.parametrize(("process", "number"), [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, 0)])
def test_a_process_that_is_stopped_or_hangs_is_missed_and_the_run_continues(
    alone: Path, tmp_path: Path, process: int, number: int
):
    runtime = {"heartbeat_timeout": 10, "hang_timeout": 20}
    hurts = [(process, 6, int(number))]
    launcher = Training(tmp_path / "run", STEPS, hurts=hurts, runtime=runtime)
    assert launcher.run(failures=1) == 0, "\n".join(launcher.said)
    assert launcher.starts == 2 and ended_alike(launcher.folder, alone, STEPS)
    if not number:
        assert "step 6 has not ended" in (launcher.folder / "hang-1.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_batch_that_is_not_finite_in_one_process_is_judged_alike_by_all(tmp_path: Path, policy: str):
    done, folders = [], []
    for workers in (1, 2):
        settings = {"health": {"on_nonfinite": policy}}
        launcher = Training(tmp_path / f"{workers}", STEPS, workers, nonfinite=[8], settings=settings)
        assert launcher.run() == 0, "\n".join(launcher.said)
        events = [json.loads(line) for line in (launcher.folder / "health.jsonl").read_text().splitlines()]
        done.append([(event["step"], event["action"]) for event in events])
        folders.append(launcher.folder)
    assert done[0] == done[1] == [(8, "skipped" if policy == "skip" else "rolled back")]
    assert ended_alike(*folders, STEPS)
    assert launcher.made(0, 0) == launcher.made(0, 1)
