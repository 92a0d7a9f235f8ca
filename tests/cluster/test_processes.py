"""How processes find each other, what they agree on, and what becomes of one whose others do not start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.cluster import processes
from affinage.cluster.launch import reserved_port
from affinage.errors import UserError

AGREE = """
from affinage.cluster.processes import ProcessLost, init_distributed
with init_distributed() as processes:
    print([processes.all_min("rows", value) for value in ([7, 2, 5], [5, 3, 5])[processes.index]],
          processes.broadcast("a word", ["of", processes.index]), flush=True)
    if processes.first:
        try:
            processes.barrier("the middle", seconds=0.5)
        except ProcessLost as error:
            print(error, flush=True)
    processes.barrier("the end")
"""
ALONE = """
import sys
from affinage.cli.program import main
from affinage.cluster import processes
processes.TO_START = 2.0
main(["run", sys.argv[1], "--runs", sys.argv[2]])
"""
# Of the second of two processes, as Open MPI gives it, which JAX detects.
OPEN_MPI = {
    processes.COORDINATOR: "auto",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"


def environment(index: int, address: str) -> dict[str, str]:
    place = {processes.COORDINATOR: address, processes.NUM_PROCESSES: "2", processes.PROCESS_ID: str(index)}
    return os.environ | place


def test_processes_agree_on_the_least_and_on_the_firsts_word_and_one_that_does_not_come_is_named():
    held, address = reserved_port()
    command = [sys.executable, "-c", AGREE]
    both = [
        subprocess.Popen(command, env=environment(index, address), stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    with held:
        first, second = [
            [line for line in each.communicate(timeout=300)[0].splitlines() if "Gloo" not in line] for each in both
        ]
    assert [each.returncode for each in both] == [0, 0]
    agreed = "[5, 2, 5] ['of', 0]"
    assert second == [agreed] and first[0] == agreed
    assert "`the middle`" in first[1] and "0.5 s" in first[1]


def test_a_process_whose_others_do_not_start_ends_so_that_it_is_started_again(tmp_path: Path):
    held, address = reserved_port()
    command = [sys.executable, "-c", ALONE, str(TINY), str(tmp_path)]
    places = {f"{address}: process 1 of 2": environment(1, address), "auto: this process": os.environ | OPEN_MPI}
    with held:
        started = {
            words: subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True)
            for words, place in places.items()
        }
        for words, process in started.items():
            stderr = process.communicate(timeout=300)[1]
            assert process.returncode == 1, stderr
            assert f"{words} did not meet the others" in stderr
            assert "Traceback" not in stderr and "stack trace" not in stderr


def test_the_environment_gives_a_process_its_place(monkeypatch: pytest.MonkeyPatch):
    for name in (processes.COORDINATOR, processes.NUM_PROCESSES, processes.PROCESS_ID):
        monkeypatch.delenv(name, raising=False)
    assert processes.placement() is None
    monkeypatch.setenv(processes.COORDINATOR, "10.0.0.1:4321")
    monkeypatch.setenv(processes.NUM_PROCESSES, "4")
    with pytest.raises(UserError) as refused:
        processes.placement()
    assert processes.NUM_PROCESSES in refused.value.where and refused.value.fix
    monkeypatch.setenv(processes.PROCESS_ID, "4")
    with pytest.raises(UserError):
        processes.placement()
    monkeypatch.setenv(processes.PROCESS_ID, "3")
    assert processes.placement() == processes.Placement("10.0.0.1:4321", 4, 3)
    monkeypatch.setenv(processes.COORDINATOR, "auto")
    assert processes.placement() == processes.Placement("auto")
