"""`affinage checkpoint`: what a script and a person learn about a training's checkpoints."""

import json
from contextlib import contextmanager

import pytest

from affinage.checkpoint.metadata import METADATA


@pytest.fixture
def said(own_runs, affinage):
    """Run `affinage checkpoint ... --json` and return (exit status, what it printed, standard error)."""

    def run(*words: str):
        status, out, error = affinage("checkpoint", *words, "--runs", str(own_runs), "--json")
        return status, json.loads(out) if out else None, error

    return run


@contextmanager
def rotten(path):
    """Inside, a bit near its end is another."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    yield
    path.write_bytes(whole)


def test_steps_their_arrays_and_facts_are_shown_and_what_is_corrupted_is_named(said, own_runs):
    checkpoints = own_runs / "tiny" / "pretrain" / "checkpoints"
    (checkpoints / "99").mkdir()
    status, found, _ = said("ls", "tiny/pretrain")
    steps = [(each["step"], bool(each["why_not"])) for each in found]
    assert status == 0 and steps == [(18, False), (20, False), (99, True)]
    assert all(each["bytes"] > 0 and each["saved"] for each in found[:2])
    _, newest, _ = said("show", "tiny/pretrain")
    assert newest["step"] == 20 and newest["identity"]["schedule"]["peak_lr"] == 3e-3
    assert newest["arrays"]["params.embed.embedding"].startswith("float32 [")
    status, _, error = said("show", "tiny/pretrain@9")
    assert status == 2 and "@18, @20" in error

    status, found, _ = said("verify", "tiny/pretrain")
    assert status == 0 and [(each["step"], each["corruption"]) for each in found] == [(18, None), (20, None)]
    with rotten(next(iter((checkpoints / "18" / "params").glob("d/*")))):
        status, found, error = said("verify", "tiny/pretrain")
        assert status == 2 and "1 of 2" in error and [each["step"] for each in found if each["corruption"]] == [18]
        assert [said("verify", f"tiny/pretrain@{step}")[0] for step in (18, 20)] == [2, 0]
    with rotten(checkpoints / "18" / METADATA):
        status, _, error = said("show", "tiny/pretrain@18")
        assert status == 2 and METADATA in error
