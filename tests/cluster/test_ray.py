"""Workers on the machines of a Ray cluster."""

import os
import signal
import sys
from pathlib import Path

from affinage.cluster.launch import WorkerExit, WorkerGroup, supervise
from affinage.cluster.ray_launch import RayLauncher
from waiting import until

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


def test_workers_run_on_rays_machines_save_when_they_get_a_signal_and_start_again(tmp_path: Path):
    said: list[str] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: one")

    def running() -> WorkerGroup:
        for file in (*tmp_path.glob("process-*"), *tmp_path.glob("saved-*")):
            file.unlink()
        group = launcher.start(["wait", str(tmp_path), str(recipe)])
        until(lambda: all((tmp_path / f"process-{worker}").exists() for worker in range(2)))
        return group

    def exits(group: WorkerGroup, count: int) -> list[WorkerExit]:
        found: list[WorkerExit] = []
        until(lambda: found.extend(group.exits(1.0)) or len(found) == count)
        return found

    files = {str(recipe): b"name: other"}
    launcher = RayLauncher(2, devices=1, files=files, say=said.append, program=PROGRAM)
    try:
        group = running()
        group.send(signal.SIGTERM)
        assert [each.status for each in exits(group, 2)] == [75, 75]
        group.kill()
        assert {(tmp_path / f"saved-{worker}").read_text() for worker in range(2)} == {"SIGTERM"}
        assert {"0 | name: other", "1 | name: other", "0 | worker 0 of 2", "1 | worker 1 of 2"} <= set(said)
        group = running()
        process, actor = map(int, (tmp_path / "process-1").read_text().split())
        os.kill(actor, signal.SIGKILL)  # the worker of Ray, and with it the process that it has started
        assert [(each.worker, each.status) for each in exits(group, 1)] == [(1, -signal.SIGKILL)]
        until(lambda: not Path(f"/proc/{process}").exists())
        group.kill()
        assert supervise(launcher.start, ["exit", "1"], max_failures=1, say=said.append) == 1
        assert sum("ended with status 1" in line for line in said) == 2
        fewer = RayLauncher(2, min_workers=1, devices=1, say=said.append, program=PROGRAM)
        group = fewer.start(["exit", "0"])
        group.kill()
        assert group.workers == 1  # there is one machine
    finally:
        launcher.close()
