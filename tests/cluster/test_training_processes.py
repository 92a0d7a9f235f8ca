"""A training in processes of its own: killed, told to stop in any phase or hung, in one or in two, the same bits.

Two processes have half of the devices each; they compute together by `jax.distributed` and Gloo.
"""

import signal
from pathlib import Path

import pytest
from training_process import BEFORE_STEPS, Training, ended_alike

import tiny
from affinage.cluster import launch

FULL = pytest.mark.full
STEPS, EVERY = 20, 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by one process with all devices."""
    launcher = Training(tmp_path_factory.mktemp("alone") / "run", STEPS, workers=1)
    assert launcher.run() == 0, "\n".join(launcher.said)
    return launcher.folder


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_QUICK", 0.0)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=FULL)])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path, alone: Path, kills: int):
    """Every other time after a step, else in the start, the compilation, the restore."""
    trainings, killed, lost = [Training(tmp_path / "run", STEPS, workers=1)], 0, 0
    for kill in range(kills):
        if trainings[-1].newest() > STEPS - 2 * EVERY:  # nearly done: there is more to kill in another run
            trainings.append(Training(tmp_path / f"run-{kill}", STEPS, workers=1))
        training = trainings[-1]
        begun = training.newest()
        training.hurts.append((0, ("step", "start")[kill % 2], int(signal.SIGKILL)))
        killed += training.run() == 1
        lost = max(lost, max([begun, *training.made(training.starts - 1, 0)]) - training.newest())
    assert killed >= max(1, kills // 2)
    assert lost <= 2 * EVERY  # an interval, and the save in flight
    for training in trainings:
        assert training.run() == 0, training.said
        assert ended_alike(training.folder, alone, STEPS)


ALL = (*BEFORE_STEPS[:3], "evaluation", "restore", "save", "step")


@pytest.mark.parametrize("phases", [("compilation", "save"), pytest.param(ALL, marks=FULL)], ids=len)
def test_told_to_stop_in_any_phase_it_loses_no_step(tmp_path: Path, alone: Path, phases: tuple[str, ...]):
    hurts = [(0, phase, int((signal.SIGTERM, signal.SIGINT)[index % 2])) for index, phase in enumerate(phases)]
    training = Training(tmp_path / "run", STEPS, workers=1, hurts=hurts)
    assert training.run() == 0, training.said
    made = [training.made(start, 0) for start in range(training.starts)]
    for phase, steps in zip(phases, made, strict=False):
        assert f"0 | signal in {phase}" in training.said
        assert bool(steps) == (phase not in BEFORE_STEPS), phase
    assert [step for steps in made for step in steps] == list(range(1, STEPS + 1)) and len(made) == len(phases) + 1
    assert ended_alike(training.folder, alone, STEPS)


def test_two_processes_save_when_one_is_preempted_start_again_and_end_with_the_bits_of_one(alone: Path, tmp_path: Path):
    launcher = Training(tmp_path / "run", STEPS, hurts=[(1, 2, int(signal.SIGTERM))])
    assert launcher.run() == 0, "\n".join(launcher.said)
    assert any(line.endswith("was preempted, or hung; all start again (0 of 0 failures)") for line in launcher.said)
    made = launcher.made(0, 0)
    assert launcher.made(0, 1) == made and len(made) < STEPS
    assert launcher.made(1, 0) == launcher.made(1, 1) == list(range(made[-1] + 1, STEPS + 1))
    assert ended_alike(launcher.folder, alone, STEPS)


@FULL
def test_processes_that_are_killed_again_and_again_change_no_bit(alone: Path, tmp_path: Path):
    hurts = [(step % 2, step, int(signal.SIGKILL)) for step in (1, 6, 7, 12)]
    launcher = Training(tmp_path / "run", STEPS, hurts=hurts)
    assert launcher.run(failures=len(hurts) - 1) == 1, "\n".join(launcher.said)
    assert any("worker 0 was killed by SIGKILL; all start again" in line for line in launcher.said)
    launcher.workers = 1  # another number of processes
    assert launcher.run() == 0, "\n".join(launcher.said)
    assert launcher.starts == len(hurts) + 1 and ended_alike(launcher.folder, alone, STEPS)


@FULL
@pytest.mark.parametrize(("process", "number"), [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, 0)])
def test_a_process_that_is_stopped_or_hangs_is_missed_and_the_run_continues(alone, tmp_path, process, number):
    runtime = {"heartbeat_timeout": 10, "hang_timeout": 20}
    launcher = Training(tmp_path / "run", STEPS, hurts=[(process, 6, int(number))], runtime=runtime)
    assert launcher.run(failures=1) == 0, "\n".join(launcher.said)
    assert launcher.starts == 2 and ended_alike(launcher.folder, alone, STEPS)
    if not number:
        assert "step 6 has not ended" in (launcher.folder / "hang-1.txt").read_text()


@FULL
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_batch_that_is_not_finite_in_one_process_is_judged_alike_by_all(tmp_path: Path, policy: str):
    done, folders = [], []
    for workers in (1, 2):
        settings = {"health": {"on_nonfinite": policy}}
        launcher = Training(tmp_path / f"{workers}", STEPS, workers, nonfinite=[8], settings=settings)
        assert launcher.run() == 0, "\n".join(launcher.said)
        done.append([(event["step"], event["action"]) for event in tiny.lines(launcher.folder, "health.jsonl")])
        folders.append(launcher.folder)
    assert done[0] == done[1] == [(8, "skipped" if policy == "skip" else "rolled back")]
    assert ended_alike(*folders, STEPS)
    assert launcher.made(0, 0) == launcher.made(0, 1)
