"""Strict settings for every test: eight CPU devices, rank promotion raises, no network, one compilation cache.

Tiers: a test without a mark is part of `make test`; one marked `full` runs in `make test-all` only.
"""

import ctypes
import gc
import os
import platform
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
# One cache of compiled programs for all that a session starts; AFFINAGE_TEST_CACHE names one that is kept.
if "AFFINAGE_TEST_CACHE" in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["AFFINAGE_TEST_CACHE"]
elif "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="affinage-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers one, and tables would be folded to it
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # tests that compile for TPUs run beside each other
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import jax
import pytest
from hypothesis import settings

import tiny_run
from run_affinage import affinage, answer  # noqa: F401

jax.config.update("jax_numpy_rank_promotion", "raise")

# Two slow cores run these tests: a deadline would only measure the machine, and CI must be repeatable.
settings.register_profile("affinage", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("affinage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What reads the trained run comes last, so that only one worker waits while it is made."""
    items.sort(key=lambda item: "tiny_runs" in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of every later garbage collection."""
    gc.collect()
    gc.freeze()


MOST_MEMORY = 5 * 2**20  # KiB of one process, of which two run in 24 GiB beside what tests start


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Forget compiled programs after a file, in a process that has once grown large."""
    yield
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY:
        jax.clear_caches()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)


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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser: see its module."""
    import browser

    with browser.browser() as one:
        yield one


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with one finished run, `tiny`: corpus, tokenizer, pretraining, SFT, DPO with LoRA, evaluation,
    export and report. All workers share it. Read it only; what changes a run takes `own_runs`."""
    return tiny_run.shared(tmp_path_factory.getbasetemp())


@pytest.fixture
def own_runs(tiny_runs: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_runs` for one test, which may change it."""
    return tiny_run.copied(tiny_runs, tmp_path / "runs")
