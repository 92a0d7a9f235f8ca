"""Hosts that save together never wait for each other on their devices, whatever a newer Orbax does."""

from pathlib import Path
from typing import Any

import pytest
from orbax.checkpoint._src.multihost import multihost as older
from orbax.checkpoint.experimental.v1._src.saving import execution
from orbax.checkpoint.experimental.v1._src.synchronization import multihost

from affinage.checkpoint import CheckpointStore
from affinage.errors import UserError
from affinage.hardware.hosts import Hosts
from hosts_in_memory import HostInMemory

GATHERING = [(module, "broadcast_one_to_all") for module in (multihost, older)] + [(multihost, "process_allgather")]


@pytest.fixture(autouse=True)
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((execution, "_check_directory_consistency"), *GATHERING):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setattr(Hosts, "current", HostInMemory(1, 2))


def test_an_orbax_that_asks_in_another_way_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(execution, "_check_directory_consistency")
    with pytest.raises(UserError, match=r"this one has no \S*saving\.execution\._check_directory_consistency"):
        CheckpointStore(tmp_path)


@pytest.mark.parametrize(("module", "name"), GATHERING, ids=["broadcast", "older broadcast", "gather"])
def test_an_orbax_that_asks_more_by_devices_is_an_error_and_no_standstill(tmp_path: Path, module: Any, name: str):
    CheckpointStore(tmp_path)
    with pytest.raises(RuntimeError, match="a program on the devices of all beside their steps"):
        getattr(module, name)(1)
