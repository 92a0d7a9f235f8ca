"""Strict settings for every test: eight CPU devices, rank promotion raises, no network."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # the tests compile much and compute little
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",  # XLA aborts after 40 s; a busy machine is no error
    ]
)
os.environ.setdefault("NPROC", "64")  # XLA's threads: a collective holds one for each device while it waits
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # shells start what is in the background so, and it is inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup has it so: heeded by what tests start, and not here
    signal.signal(signal.SIGHUP, lambda *_: None)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # tests choose theirs, and what they start as well
os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers one, and tables would be folded to it
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # tests that compile for TPUs run beside each other
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import jax
import pytest
from hypothesis import settings

from affinage.hardware.allocator import give_back_freed_memory

jax.config.update("jax_numpy_rank_promotion", "raise")

# Two slow cores run these tests: a deadline would only measure the machine, and CI must be repeatable.
settings.register_profile("affinage", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("affinage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that none of the processes is left with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """What one file compiled is of no use to the next, and would fill gigabytes."""
    yield
    jax.clear_caches()
    give_back_freed_memory()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a test, or what it calls, sets in the environment is not there in the next: each passes in any order."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name == "PYTEST_CURRENT_TEST" or name.startswith("RAY_"):  # Ray reads its own once in a process
            continue
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What stands in a command for `python`, and starts without the seconds that imports take: see the module."""
    import warm_python

    with warm_python.serving(tmp_path_factory.mktemp("warm")) as python:
        yield python


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server of S3's protocol, on the loopback address."""
    import s3_server

    with s3_server.serving() as address:
        yield address


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Makes URLs in a bucket of its own, which the environment has the keys for."""
    from s3_server import make_bucket

    return make_bucket(s3_server, monkeypatch, _bucket_of(tmp_path))


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The address of a server of Google Cloud Storage's protocol, on the loopback address."""
    import gcs_server

    with gcs_server.serving() as address:
        yield address


@pytest.fixture
def google_bucket(gcs_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Makes URLs in a bucket of its own at that server."""
    from gcs_server import make_bucket

    return make_bucket(gcs_server, monkeypatch, _bucket_of(tmp_path))


def _bucket_of(folder: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{folder.parent.name}-{folder.name}".lower()).strip("-")[-60:].strip("-")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for the compilations of the runs of a file."""
    return tmp_path_factory.mktemp("cache")
