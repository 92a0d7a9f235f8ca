"""A cloud slice against a local server that speaks the TPU API's protocol."""

from collections.abc import Callable, Iterator

import pytest
import requests

from affinage.config.claims import CloudSettings
from affinage.errors import UserError
from affinage.hardware.cloud import CloudSlice
from affinage.hardware.slices import find_slice
from tpu_api import Cloud, serving

SETTINGS = CloudSettings(project="lab", zone="us-central2-b", spot=True, wait_hours=0.1)


@pytest.fixture
def cloud() -> Iterator[tuple[Cloud, str]]:
    with serving() as served:
        yield served


def rented(
    api: str, name: str = "v4-32", pause: Callable[[float], None] = lambda seconds: None, **changes: object
) -> CloudSlice:
    settings = SETTINGS.model_copy(update=changes)
    return CloudSlice("run-1", find_slice(name), settings, print, requests.Session(), pause=pause, api=api)


def test_it_is_asked_for_used_and_given_back_whatever_happens(cloud: tuple[Cloud, str]):
    server, api = cloud
    with rented(api, "v5e-16") as hosts:
        assert [host.internal for host in hosts] == ["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert "run-1" in server.queue
    assert server.queue == {}
    [wish] = server.wishes
    [spec] = wish["tpu"]["nodeSpec"]
    node = spec["node"]
    assert node["acceleratorType"] == "v5litepod-16" and node["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert spec["parent"] == "projects/lab/locations/us-central2-b"
    assert wish["spot"] == {} and wish["queueingPolicy"] == {"validUntilDuration": "360s"}
    with pytest.raises(KeyboardInterrupt), rented(api):
        raise KeyboardInterrupt
    assert server.queue == {}
    server.course = ["WAITING_FOR_RESOURCES"]
    interrupts = iter([KeyboardInterrupt])

    def pause(seconds: float) -> None:
        for error in interrupts:
            raise error

    with pytest.raises(KeyboardInterrupt), rented(api, pause=pause):
        pass
    assert server.queue == {}


def test_one_that_is_there_is_taken_over_and_one_that_was_taken_back_is_asked_for_again(cloud: tuple[Cloud, str]):
    server, api = cloud
    for course, wishes in (["ACTIVE"], 0), (["SUSPENDED"], 1):
        server.queue["run-1"] = {"course": course}
        assert len(rented(api).acquire()) == 4 and len(server.wishes) == wishes


def test_a_busy_cloud_is_asked_again_and_a_lost_answer_makes_no_second_slice(cloud: tuple[Cloud, str]):
    server, api = cloud
    pauses: list[float] = []
    server.busy, server.forget_answer = 3, True
    assert rented(api).acquire() and len(server.wishes) == 1
    server.drop = 5
    assert rented(api, pause=pauses.append).state() == "ACTIVE" and pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    server.drop = 6
    with pytest.raises(UserError):
        rented(api).state()


@pytest.mark.parametrize(
    ("course", "changes", "what"),
    [
        (["ACTIVE"], {"project": "another"}, "permission denied"),
        (["WAITING_FOR_RESOURCES", "FAILED"], {}, "no quota"),
        (["WAITING_FOR_RESOURCES"], {}, "has not come in 0.1 h"),
        (["ACTIVE"], {"name": "h100x8"}, "not a TPU slice"),
    ],
)
def test_what_the_cloud_refuses_is_passed_on(cloud: tuple[Cloud, str], course: list, changes: dict, what: str):
    server, api = cloud
    server.course = course
    with pytest.raises(UserError, match=what):
        rented(api, **changes).acquire()
