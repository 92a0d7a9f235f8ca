"""`affinage checkpoint`: what a script and a person learn about a training's checkpoints."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.metadata import METADATA
from affinage.pipeline.models import MODEL


def save(runs: Path, name: str, steps: Mapping[int, tuple[dict, dict]]) -> Path:
    """A training with these checkpoints, of state and facts; its folder of checkpoints."""
    training = runs / name / "pretrain"
    store = CheckpointStore(training / "checkpoints", keep_last=9)
    for step, (state, facts) in steps.items():
        store.save(step, state, facts)
    store.wait()
    (training / MODEL).write_text("{}")
    return store.folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    steps = {
        step: (
            {"params": {"a": jnp.ones(4), "b": jnp.full((2, 2), float(step))}, "step": jnp.int32(step)},
            {"saved": "today", "identity": {"schedule": {"peak_lr": peak}}},
        )
        for step, peak in ((1, 0.1), (2, 0.1), (3, 0.2))
    }
    (save(runs, "small", steps) / "4").mkdir()
    return runs


@pytest.fixture
def said(runs: Path, affinage) -> Callable[..., tuple[int, Any, str]]:
    """Run `affinage checkpoint ... --json` and return (exit status, what it printed, standard error)."""

    def run(*words: str) -> tuple[int, Any, str]:
        status, out, error = affinage("checkpoint", *words, "--runs", str(runs), "--json")
        return status, json.loads(out) if out else None, error

    return run


@contextmanager
def rotten(path: Path) -> Iterator[None]:
    """Inside, a bit near its end is another."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    yield
    path.write_bytes(whole)


def test_ls_and_show_have_every_step_its_arrays_and_facts(said):
    status, found, _ = said("ls", "small/pretrain")
    assert status == 0 and all(each["bytes"] > 0 for each in found[:3])
    expected = [*((step, False, "today") for step in (1, 2, 3)), (4, True, None)]
    assert [(each["step"], bool(each["why_not"]), each["saved"]) for each in found] == expected
    _, newest, _ = said("show", "small/pretrain")
    assert newest["step"] == 3 and newest["identity"] == {"schedule": {"peak_lr": 0.2}}
    assert newest["arrays"]["params.a"] == "float32 [4]"
    status, _, error = said("show", "small/pretrain@9")
    assert status == 2 and "@1, @2, @3" in error


def test_verify_reads_all_and_names_what_is_corrupted(said, runs: Path):
    status, found, _ = said("verify", "small/pretrain")
    assert status == 0 and [(each["step"], each["corruption"]) for each in found] == [(n, None) for n in (1, 2, 3)]
    second = runs / "small" / "pretrain" / "checkpoints" / "2"
    with rotten(next(path for path in (second / "params").glob("d/*"))):
        status, found, error = said("verify", "small/pretrain")
        assert status == 2 and "1 of 3" in error and [each["step"] for each in found if each["corruption"]] == [2]
        assert [said("verify", f"small/pretrain@{step}")[0] for step in (1, 2)] == [0, 2]
    with rotten(second / METADATA):
        status, _, error = said("show", "small/pretrain@2")
        assert status == 2 and METADATA in error
