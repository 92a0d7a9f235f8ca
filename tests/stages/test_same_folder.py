"""Hosts that do not see one folder of runs are told so at once, all of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.stages import same_folder
from hosts_in_memory import Coordinator, HostInMemory


def check(*folders: Path) -> list[UserError | None]:
    """What each host is told, of which each has a folder."""
    coordinator = Coordinator()

    def one(host: int) -> UserError | None:
        try:
            same_folder.check_same_folder(HostInMemory(host, len(folders), coordinator=coordinator), folders[host])
        except UserError as told:
            return told
        return None

    with ThreadPoolExecutor(len(folders)) as hosts:
        return list(hosts.map(one, range(len(folders))))


def test_one_folder_by_two_names_is_one(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "runs")
    assert check(tmp_path / "runs", tmp_path / "mounted", tmp_path / "runs") == [None] * 3
    assert list((tmp_path / "runs").iterdir()) == []


def test_hosts_with_disks_of_their_own_are_named_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(same_folder, "_SHOWN_WITHIN", 0.5)
    (tmp_path / "b").mkdir()
    told = check(tmp_path / "a", tmp_path / "b", tmp_path / "a", tmp_path / "missing")
    for error in told:
        assert error is not None
        assert f"host 1 has {tmp_path}/b on " in error.what and f"host 3 has {tmp_path}/missing on " in error.what
        assert "host 2" not in error.what and "--runs" in error.fix
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_a_host_alone_writes_nothing(tmp_path: Path):
    assert check(tmp_path / "runs") == [None] and not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_a_mistake_that_the_first_host_tells(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="host 0 cannot write there: not a directory"):
        same_folder.check_same_folder(HostInMemory(0, 2), tmp_path / "file" / "runs")
