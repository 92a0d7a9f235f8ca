"""Processes that do not see one folder of runs are refused at once, all of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from affinage.errors import UserError
from affinage.pipeline.same_folder import check_same_folder
from processes_in_memory import in_memory


def check(*folders: Path) -> list[UserError | None]:
    """The error of each process, of which each has a folder."""
    processes = in_memory(len(folders))

    def one(index: int) -> UserError | None:
        try:
            check_same_folder(processes[index], folders[index], within=2)
        except UserError as told:
            return told
        return None

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(one, range(len(folders))))


def test_one_folder_by_two_names_is_one(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "runs")
    assert check(tmp_path / "runs", tmp_path / "mounted") == [None] * 2
    assert list((tmp_path / "runs").iterdir()) == []
    assert check(tmp_path / "alone") == [None] and not (tmp_path / "alone").exists()


def test_processes_with_disks_of_their_own_are_named_to_all(tmp_path: Path):
    (tmp_path / "b").mkdir()
    for error in check(tmp_path / "a", tmp_path / "b", tmp_path / "a"):
        assert error is not None and error.fix
        assert "process 1" in error.what and str(tmp_path / "b") in error.what and "process 2" not in error.what
