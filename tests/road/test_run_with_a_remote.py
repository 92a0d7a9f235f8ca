"""The road on machines whose disks vanish: the next one takes results and the training from a bucket."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import s3_server as s3
from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import RemoteFolder
from affinage.checkpoint.remote_steps import find_steps
from affinage.cli.program import main
from affinage.training.metrics import curve

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
SECRETS = {
    "WANDB_API_KEY": "a-key-of-weights-and-biases",
    "HF_TOKEN": "a-token-of-hugging-face",
    "GITHUB_TOKEN": "a-token-of-another-program",
}
SETTINGS = ["data.sources=[{path: pocket-world, megabytes: 0.05}]", "sft=null", "evaluate=null", "export=null"]


def run(runs: Path, *words: str) -> int:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    given = ["--set", *words] if "=" in words[0] else words
    with pytest.raises(SystemExit) as ended:
        main(["run", TINY, "--runs", str(runs), *settings, *given])
    return int(ended.value.code or 0)


save = CheckpointStore.save


def saved_and_copied(store: CheckpointStore, *given: object) -> None:
    """A save that is not over before it is copied: else steps are passed over, which ones hangs on the machine."""
    save(store, *given)
    store.wait()
    assert store._copies.settle() == ""


@pytest.mark.parametrize("where", ["bucket", "google_bucket"])
def test_an_empty_machine_goes_on_from_the_copy_and_nothing_anywhere_has_a_secret(
    tmp_path: Path,
    where: str,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("affinage.stages.remote_results._SMALL_FILE", 1000)
    monkeypatch.setattr(CheckpointStore, "save", saved_and_copied)
    url = request.getfixturevalue(where)("runs")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert run(first, f"remote={url}") == 0
    steps = find_steps(url)
    assert steps.steps() == [15, 20]
    # As if the machine had been taken away in the midst of the last save.
    steps.folder.remove(["20/SHA256SUMS"])
    [training] = [name for name in RemoteFolder(url).names() if name.startswith("pretrain-")]
    [report] = [name for name in RemoteFolder(url).names() if name.startswith("report-")]
    RemoteFolder(url).remove([f"{training}/manifest.json", f"{report}/manifest.json"])
    said = capfd.readouterr()

    assert run(second, f"remote={url}") == 0
    again = capfd.readouterr()
    assert f"copying step 15 from {url}" in again.out and "goes on from the checkpoint at step 15" in again.out
    made = json.loads((second / "tiny" / "report" / "manifest.json").read_text())["inputs"]
    assert f"{len(made) - 1} stages were complete before" in again.out
    assert not list((second / "store").glob("clean-*/*.parquet")), "of large results only what they say"
    assert run(third, f"remote={url}") == 0  # there is nothing left to do, but to bring it here
    for place in ("pretrain/summary.json", "report.html", "pretrain/checkpoints/20/SHA256SUMS"):
        assert (third / "tiny" / place).read_bytes() == (second / "tiny" / place).read_bytes()
    found = [json.loads((runs / "tiny/pretrain/summary.json").read_text()) for runs in (first, second)]
    assert found[0]["resumed_at"] == [] and found[1]["resumed_at"] == [15]
    assert found[0]["final_loss"] == found[1]["final_loss"]
    curves = [curve(runs / "tiny" / "pretrain") for runs in (first, second)]
    assert curves[0] == curves[1] and curves[0][-1]["step"] == 20
    assert find_steps(url).damage(20) == ""

    kept = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    remote = RemoteFolder(url)
    kept |= {name: remote.read(name) or b"" for name in remote.sizes()}
    kept |= {"said": (said.out + said.err + again.out + again.err).encode()}
    for secret in (s3.ACCESS_KEY, s3.SECRET_KEY, *SECRETS.values()):
        assert [name for name, contents in kept.items() if secret.encode() in contents] == []


def test_a_remote_that_cannot_be_reached_is_told_before_the_training(
    tmp_path: Path, bucket: Callable[[str], str], capfd: pytest.CaptureFixture[str]
):
    bucket("runs")
    assert run(tmp_path, "remote=s3://nobody-made-this-bucket/runs") == 2
    said = capfd.readouterr().err
    assert "nobody-made-this-bucket" in said and "tiny.yaml" not in said and "--set remote" in said
    assert s3.SECRET_KEY not in said
    for wrong in ("/a/folder", "s3://key:word@bucket/x", "s3://bucket/x?token=0a1b2c"):
        assert run(tmp_path, f"remote={wrong}") == 2
        assert "word@" not in capfd.readouterr().err


def test_a_result_that_is_damaged_there_is_not_taken(
    tmp_path: Path, bucket: Callable[[str], str], capfd: pytest.CaptureFixture[str]
):
    url = bucket("runs")
    words = ["--until", "tokenizer", "--set", f"remote={url}"]
    assert run(tmp_path / "first", *words) == 0
    name = next(name for name in RemoteFolder(url).sizes() if name.startswith("split-") and name.endswith(".parquet"))
    contents = bytearray(RemoteFolder(url).read(name) or b"")
    contents[len(contents) // 2] ^= 1
    RemoteFolder(url).write(name, bytes(contents))
    [tokenizer] = [name for name in RemoteFolder(url).names() if name.startswith("tokenizer-")]
    RemoteFolder(url).remove([f"{tokenizer}/manifest.json"])
    assert run(tmp_path / "second", *words) == 2
    assert "is not what was copied there" in capfd.readouterr().err
    RemoteFolder(url).remove([f"{name.partition('/')[0]}/manifest.json"])
    assert run(tmp_path / "second", *words) == 0  # made again, from what is whole
    places = [tmp_path / runs / "tiny" / "tokenizer" / "tokenizer.model" for runs in ("first", "second")]
    assert places[0].read_bytes() == places[1].read_bytes()
