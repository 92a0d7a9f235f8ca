"""Checkpoints that a stranger wrote and sealed himself: the seal is right, and what is in them is not what we write."""

import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tensorstore

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.looking import fingerprint, fingerprints
from affinage.checkpoint.seal import SEAL, seal
from affinage.cli.program import main
from affinage.errors import UserError
from affinage.pipeline.names import MODEL
from affinage.training.summary import check_carried

Change = Callable[[Path], object]  # of the folder of a step
PARAMS = "params"
OLD, NEW = "small/pretrain@1", "small/pretrain@2"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    store = CheckpointStore(folder, keep_last=2)
    for step in (1, 2):
        state = {"step": jnp.int32(step), PARAMS: {"w": jnp.arange(600, dtype=jnp.float32) + step}}
        store.save(step, state, {"saved": "today", "identity": {"seed": step}})
    store.wait()
    return folder


def wanted() -> dict:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=here),
        PARAMS: {"w": jax.ShapeDtypeStruct((600,), jnp.float32, sharding=here)},
    }


def said(**changed: Any) -> Change:
    """Change what the checkpoint says of itself."""
    return in_json("_CHECKPOINT_METADATA", lambda found: found | changed)


def in_json(name: str, change: Callable[[dict], Any]) -> Change:
    """Change a file of JSON; what is text afterwards is written as it is."""

    def act(step: Path) -> None:
        changed = change(json.loads((step / name).read_text()))
        (step / name).write_text(changed if isinstance(changed, str) else json.dumps(changed))

    return act


def facts_as(text: str) -> Change:
    return in_json("_CHECKPOINT_METADATA", lambda found: json.dumps(found).replace('"today"', text))


def tree_as(old: str, new: str) -> Change:
    return in_json(f"{PARAMS}/_METADATA", lambda found: json.dumps(found).replace(old, new))


def array_as(**changed: Any) -> Change:
    """Change what the array `w` says of itself."""

    def act(step: Path) -> None:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/{PARAMS}/"}).result()
        found = json.loads(store.read("w/zarr.json").result().value)
        store.write("w/zarr.json", json.dumps(found | changed)).result()

    return act


STRANGERS: dict[str, tuple[Change, bool]] = {  # and whether it is seen before anything is loaded
    "words in place of facts": (said(custom_metadata={"step": 2, "facts": "words"}), True),
    "100,000 levels": (facts_as("[" * 100_000 + "]" * 100_000), True),
    "code for a handler": (said(item_handlers={PARAMS: "trap.Trap", "step": "trap.Trap"}), True),
    "an oversized header": (lambda step: os.truncate(step / PARAMS / "_METADATA", 2**26 + 1), True),
    "a name that leads out": (tree_as('"w"', '"../../../../../elsewhere"'), False),
    "a dtype of objects": (array_as(data_type="object"), False),
    "a petabyte": (array_as(shape=[2**48]), True),
}


def placed(sound: Path, folder: Path, change: Change) -> CheckpointStore:
    """A training whose newest checkpoint is the stranger's."""
    training = folder / "runs" / "small" / "pretrain"
    shutil.copytree(sound, training / "checkpoints")
    (training / MODEL).write_text("{}")
    step = training / "checkpoints" / "2"
    change(step)
    (step / SEAL).unlink()
    seal(step)
    return CheckpointStore(training / "checkpoints")


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `affinage checkpoint ...`; its exit status, and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *arguments, "--runs", str(tmp_path / "runs")])
        return ended.value.code, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_checkpoint_is_passed_over_or_refused_in_words(
    sound: Path, tmp_path: Path, status: Callable, monkeypatch: pytest.MonkeyPatch, kind: str
):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nTrap = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    change, seen_before = STRANGERS[kind]
    store = placed(sound, tmp_path, change)
    before, most = everything(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CheckpointWarning)
        step, state, meta = store.restore_newest(wanted())
    assert step == 1 and meta["identity"] == {"seed": 1} and float(state[PARAMS]["w"][0]) == 1.0
    (warned,) = [str(each.message) for each in told if each.category is CheckpointWarning]
    assert warned.startswith("checkpoint 2 ") and "\n" not in warned

    with pytest.raises(UserError, match="step 2"):
        store.restore(2, wanted())
    assert status("verify", NEW)[0] == (2 if seen_before else 0)
    ended, words = status("show", NEW)
    assert ended == 2 and "step 2" in words, words
    assert everything(tmp_path) == before  # nothing written, no code run
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 200_000  # kB


@pytest.mark.parametrize(
    "facts",
    [{"seconds": "many"}, {"health": {"rewinds": [1]}}, {"clock": "now"}, {"identity": "mine"}],
)
def test_facts_that_a_training_cannot_go_on_with_are_passed_over(sound: Path, tmp_path: Path, facts: dict):
    store = placed(sound, tmp_path, said(custom_metadata={"step": 2, "facts": facts}))
    with pytest.warns(CheckpointWarning, match=f"checkpoint 2 .*{next(iter(facts))}"):
        step, _, _ = store.restore_newest(wanted(), check_carried)
    assert step == 1


def test_facts_do_not_speak_to_the_terminal_nor_for_the_reader(sound: Path, tmp_path: Path, status: Callable):
    facts = {"saved": "\x1b]0;title\x07", "\x1b[2J": 1, "seal": "mine", "fingerprint": "mine", "arrays": {}}
    store = placed(sound, tmp_path, said(custom_metadata={"step": 2, "facts": facts}))
    shown = status("show", NEW)[1]
    assert store.seal_hash(2) in shown and "float32" in shown and "mine" not in shown
    assert fingerprint(fingerprints(store, 2)) in status("show", NEW, "--arrays")[1]
    for words in (shown, status("ls", "small/pretrain")[1], status("diff", OLD, NEW)[1]):
        assert "title" in words or "saved" not in words
        assert not any(letter in words for letter in "\x1b\x07")
