"""A cloud slice against a local server that speaks the TPU API's protocol."""

from collections.abc import Iterator

import pytest
import requests

from affinage.errors import UserError
from affinage.hardware.cloud import CloudSlice
from affinage.hardware.slices import find_slice
from affinage.recipe.claims import CloudSettings
from tpu_api import Cloud, serving

SETTINGS = CloudSettings(project="lab", zone="us-central2-b", spot=True, wait_hours=0.1)


@pytest.fixture
def cloud() -> Iterator[tuple[Cloud, str]]:
    with serving() as served:
        yield served


def rented(api: str, said: list[str] | None = None, name: str = "v4-32", **changes: object) -> CloudSlice:
    settings = SETTINGS.model_copy(update=changes)
    say = (said if said is not None else []).append
    return CloudSlice("run-1", find_slice(name), settings, say, requests.Session(), pause=lambda seconds: None, api=api)


def test_it_is_asked_for_waited_for_used_and_given_back(cloud: tuple[Cloud, str]):
    server, api = cloud
    said: list[str] = []
    with rented(api, said) as hosts:
        assert [host.internal for host in hosts] == ["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert "run-1" in server.queue
    assert server.queue == {}
    (wish,) = server.wishes
    (spec,) = wish["tpu"]["nodeSpec"]
    assert spec["node"]["acceleratorType"] == "v4-32" and spec["parent"] == "projects/lab/locations/us-central2-b"
    assert wish["spot"] == {} and wish["queueingPolicy"] == {"validUntilDuration": "360s"}
    assert any("provisioning" in line for line in said) and said[-1].endswith("given back")


def test_whatever_happens_inside_it_is_given_back(cloud: tuple[Cloud, str]):
    server, api = cloud
    with pytest.raises(KeyboardInterrupt), rented(api):
        raise KeyboardInterrupt
    assert server.queue == {}


def test_an_interrupted_wait_leaves_nothing_in_the_queue(cloud: tuple[Cloud, str]):
    server, api = cloud
    server.course = ["WAITING_FOR_RESOURCES"]
    slice = rented(api)

    def interrupted(seconds: float) -> None:
        slice._pause = lambda seconds: None
        raise KeyboardInterrupt

    slice._pause = interrupted
    with pytest.raises(KeyboardInterrupt), slice:
        pass
    assert server.queue == {}


def test_one_that_is_there_is_taken_over_and_one_that_was_taken_back_is_asked_for_again(cloud: tuple[Cloud, str]):
    server, api = cloud
    server.queue["run-1"] = {"course": ["ACTIVE"]}
    assert len(rented(api).acquire()) == 4 and not server.wishes
    server.queue["run-1"] = {"course": ["SUSPENDED"]}
    assert len(rented(api).acquire()) == 4 and len(server.wishes) == 1


def test_a_busy_cloud_is_asked_again_and_a_lost_answer_makes_no_second_slice(cloud: tuple[Cloud, str]):
    server, api = cloud
    server.busy = 3
    assert rented(api).acquire()
    rented(api).release()
    server.forget_answer = True
    assert rented(api).acquire()
    assert len(server.wishes) == 2  # one of each acquisition


def test_connections_that_break_are_tried_again_as_often_as_a_busy_cloud(cloud: tuple[Cloud, str]):
    server, api = cloud
    slice, pauses = rented(api), []
    slice._pause = pauses.append
    server.drop = 5
    assert slice.state() is None and pauses == [1.0, 2.0, 4.0, 8.0, 16.0] and server.drop == 0
    server.drop = 2
    assert slice.acquire()
    server.drop = 6
    with pytest.raises(UserError, match="cannot be reached"):
        slice.state()
    server.drop = 1
    slice.release()
    assert len(server.wishes) == 1 and server.queue == {}


def test_what_the_cloud_refuses_is_told_in_its_words(cloud: tuple[Cloud, str]):
    server, api = cloud
    with pytest.raises(UserError, match=r"403.*permission denied"):
        rented(api, project="another").acquire()
    server.course = ["WAITING_FOR_RESOURCES", "FAILED"]
    with pytest.raises(UserError, match=r"not given: FAILED \(no quota\)"):
        rented(api).acquire()
    server.queue.clear()
    server.course = ["WAITING_FOR_RESOURCES"]
    with pytest.raises(UserError, match=r"has not come in 0.1 h"):
        rented(api).acquire()


def test_the_words_of_the_api_for_a_slice(cloud: tuple[Cloud, str]):
    server, api = cloud
    rented(api, name="v5e-16").acquire()
    node = server.wishes[0]["tpu"]["nodeSpec"][0]["node"]
    assert node["acceleratorType"] == "v5litepod-16" and node["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    with pytest.raises(UserError, match="not a TPU slice"):
        rented(api, name="h100x8")
