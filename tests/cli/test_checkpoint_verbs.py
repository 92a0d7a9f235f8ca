"""`affinage checkpoint`: what a script and a person learn about a training's checkpoints."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore
from affinage.cli.program import main
from affinage.stages.initial import MODEL


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    training = runs / "small" / "pretrain"
    training.mkdir(parents=True)
    (training / MODEL).write_text("{}")
    store = CheckpointStore(training / "checkpoints", keep_last=5)
    for step, peak in ((1, 0.1), (2, 0.1), (3, 0.2)):
        state = {"params": {"a": jnp.ones(4), "b": jnp.full((2, 2), float(step))}, "step": jnp.int32(step)}
        store.save(step, state, {"saved": "today", "identity": {"schedule": {"peak": peak}}})
    store.wait()
    (store.folder / "4").mkdir()
    return runs


@pytest.fixture
def said(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Run `affinage checkpoint ... --json` and return (exit status, what it printed, standard error)."""

    def run(*arguments: str):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *arguments, "--runs", str(runs), "--json"])
        out, error = capsys.readouterr()
        return ended.value.code, json.loads(out) if out else None, error

    return run


def test_ls_has_every_step_and_what_was_cut_off(said):
    status, found, _ = said("ls", "small/pretrain")
    assert status == 0
    assert [(each["step"], each["complete"], each["saved"]) for each in found] == [
        (1, True, "today"),
        (2, True, "today"),
        (3, True, "today"),
        (4, False, None),
    ]
    assert all(each["bytes"] > 0 for each in found[:3])


def test_show_has_arrays_and_facts_of_the_newest_or_a_named_one(said):
    _, newest, _ = said("show", "small/pretrain")
    assert newest["step"] == 3 and newest["identity"] == {"schedule": {"peak": 0.2}}
    assert newest["arrays"]["params"] == {"arrays": 2, "numbers": 8, "bytes": 32, "dtypes": ["float32"]}
    _, first, _ = said("show", "small/pretrain@1")
    assert first["step"] == 1 and first["seal"] != newest["seal"]
    assert "fingerprint" not in newest  # which is of arrays that were not read


def test_the_fingerprint_is_that_of_every_checkpoint_of_the_same_numbers(said, runs: Path):
    across = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    w, odd = jnp.arange(16, dtype=jnp.bfloat16), jnp.arange(16, dtype=jnp.bfloat16).at[15].set(3)
    saves = {
        "one": ({"params": {"w": w}, "step": jnp.int32(3)}, {"saved": "today"}),
        "again": ({"params": {"w": jax.device_put(w, across)}, "step": jnp.int32(3)}, {"saved": "tomorrow"}),
        "number": ({"params": {"w": odd}, "step": jnp.int32(3)}, {}),
        "name": ({"params": {"v": w}, "step": jnp.int32(3)}, {}),
        "dtype": ({"params": {"w": jax.lax.bitcast_convert_type(w, jnp.uint16)}, "step": jnp.int32(3)}, {}),
        "shape": ({"params": {"w": w.reshape(4, 4)}, "step": jnp.int32(3)}, {}),
    }
    found = {}
    for name, (state, facts) in saves.items():
        training = runs / name / "pretrain"
        store = CheckpointStore(training / "checkpoints")
        (training / MODEL).write_text("{}")
        store.save(3, state, facts)
        store.wait()
        found[name] = said("show", f"{name}/pretrain", "--arrays")[1]
    for name, of in found.items():
        status, apart, error = said("diff", "one/pretrain", f"{name}/pretrain", "--arrays")
        assert status == 0, error
        equal = not apart["arrays"]["different"] and not apart["arrays"]["only"]
        assert (of["fingerprint"] == found["one"]["fingerprint"]) == equal == (name in ("one", "again")), name
        assert of["arrays"]["step"]["fingerprint"] == found["one"]["arrays"]["step"]["fingerprint"]
    assert found["one"]["seal"] != found["again"]["seal"]


def test_diff_of_lists_tells_what_in_them_differs(runs: Path, capsys):
    kinds = {"kind": "text", "name": "", "where": {}}
    both = {
        "ours": [{"path": "a", **kinds}, {"path": "b", **kinds}],
        "theirs": [{"path": "c", **kinds}],
    }
    for name, sources in both.items():
        training = runs / name / "sft"
        store = CheckpointStore(training / "checkpoints")
        (training / MODEL).write_text("{}")
        store.save(1, {"params": {"w": jnp.zeros(1)}, "step": jnp.int32(1)}, {"settings": {"sources": sources}})
        store.wait()
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "diff", "ours/sft", "theirs/sft", "--runs", str(runs)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        "settings.sources.0.path: a -> c",
        "settings.sources.1: {path: b, kind: text} -> (not there)",
    ]


def test_diff_tells_facts_and_arrays(said):
    _, found, _ = said("diff", "small/pretrain@1", "small/pretrain@3", "--arrays")
    assert found["facts"] == [{"name": "identity.schedule.peak", "saved": 0.1, "now": 0.2}]
    assert found["arrays"]["same"] == 1 and found["arrays"]["only"] == []
    different = {each["name"]: each["most"] for each in found["arrays"]["different"]}
    assert different == {"params['b']": 2.0, "step": 2.0}
    _, alike, _ = said("diff", "small/pretrain@1", "small/pretrain@2")
    assert alike == {"facts": []}


def test_verify_reads_all_and_names_what_is_damaged(said, runs: Path):
    status, found, _ = said("verify", "small/pretrain")
    cut_off = "it is not complete: a save was cut off here"
    assert status == 0 and found == [
        *({"step": step, "damage": None, "why_not": ""} for step in (1, 2, 3)),
        {"step": 4, "damage": None, "why_not": cut_off},
    ]
    path = next((runs / "small" / "pretrain" / "checkpoints" / "2" / "params").rglob("d/*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    status, found, error = said("verify", "small/pretrain")
    assert status == 2 and "1 of 3 checkpoints is damaged" in error
    assert [each["step"] for each in found if each["damage"]] == [2]
    status, found, _ = said("verify", "small/pretrain@1")
    assert status == 0 and [each["step"] for each in found] == [1]
    path.write_bytes(whole)


def test_show_says_what_is_damaged_and_who_looks_at_what_it_does_not_read(said, runs: Path):
    folder = runs / "small" / "pretrain" / "checkpoints" / "2"
    arrays = next((folder / "params" / "ocdbt.process_0").glob("d/*"))
    seal = folder / "SHA256SUMS"
    for path, status, told in (
        (arrays, 0, "its arrays were not read: `affinage checkpoint verify small/pretrain@2` looks at them"),
        (seal, 2, "the checkpoint of step 2 is damaged: its SHA256SUMS cannot be read"),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        found, _, error = said("show", "small/pretrain@2")
        assert found == status and told in error
        if path == arrays:
            assert said("verify", "small/pretrain@2")[0] == 2
        path.write_bytes(whole)


def test_a_step_that_is_not_there_is_told(said):
    status, _, error = said("show", "small/pretrain@9")
    assert status == 2 and "@1, @2, @3" in error


def test_saves_that_were_cut_off_are_no_reason_to_say_that_all_is_well(said, runs: Path):
    training = runs / "cut" / "pretrain"
    (training / "checkpoints" / "7").mkdir(parents=True)
    (training / MODEL).write_text("{}")
    status, found, error = said("verify", "cut/pretrain")
    assert status == 2 and found is None and "no checkpoint is complete" in error and "7" in error


def test_a_step_that_is_a_link_is_called_one(runs: Path, said, capsys: pytest.CaptureFixture[str]):
    training = runs / "linked" / "pretrain"
    store = CheckpointStore(training / "checkpoints")
    (training / MODEL).write_text("{}")
    store.save(1, {"params": {"a": jnp.ones(4)}}, {"saved": "today"})
    store.wait()
    (store.folder / "2").symlink_to("1")
    (store.folder / "3").write_text("notes")
    (store.folder / "4").mkdir()
    _, listed, _ = said("ls", "linked/pretrain")
    _, verified, _ = said("verify", "linked/pretrain")
    assert [each["why_not"] for each in verified] == [each["why_not"] for each in listed]
    link, no_folder, cut_off = (each["why_not"] for each in listed[1:])
    assert "a symbolic link, which is not followed" in link and "cut off" not in link and "cut off" in cut_off
    assert listed[0]["why_not"] == "" and [each["complete"] for each in listed] == [True, False, False, False]
    for verb in ("ls", "verify"):
        with pytest.raises(SystemExit):
            main(["checkpoint", verb, "linked/pretrain", "--runs", str(runs)])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4 and all(
            why in line for why, line in zip((link, no_folder, cut_off), lines[1:], strict=True)
        )
    assert "the checkpoint of step 2 is not read: it is a symbolic link" in said("show", "linked/pretrain@2")[2]
    (store.folder / "1").rename(training / "elsewhere")
    status, _, error = said("verify", "linked/pretrain")
    assert status == 2 and "a symbolic link" in error and no_folder in error


def test_numbers_that_are_not_finite_are_compared_too(said, runs: Path):
    store = CheckpointStore(runs / "small" / "pretrain" / "checkpoints", keep_last=9)
    for step, last in ((5, 2.0), (6, float("nan"))):
        store.save(step, {"window": jnp.array([1.0, step, last]), "lost": jnp.array([last])}, {})
    store.wait()
    _, found, _ = said("diff", "small/pretrain@5", "small/pretrain@6", "--arrays")
    apart = {each["name"]: (each["most"], each["not_finite"]) for each in found["arrays"]["different"]}
    assert apart == {"window": (1.0, 1), "lost": (None, 1)}


def test_a_url_is_no_folder_of_runs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "ls", "small", "--runs", "gs://bucket/runs"])
    assert ended.value.code == 2
    assert "gs://bucket/runs is a URL" in capsys.readouterr().err
