"""The road of a model of images in its real stages, on a file of the user's own: split, training, probe and report."""

import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from quiet import Quiet

from affinage.checkpoint import CheckpointStore
from affinage.config.load import load_recipe
from affinage.data.arrays import ArrayFeed
from affinage.errors import Preempted, UserError
from affinage.pipeline.build import build_steps
from affinage.pipeline.runner import PipelineRunner, Runs
from affinage.report import write_report

RECIPE = """\
name: {name}
seed: 3
data: {{arrays: {{path: {folder}/shapes.npz, images: pictures, labels: kinds, validation_fraction: 0.25}}}}
model:
  inputs: {{images: [6, 6, 1]}}
  nodes:
    views: {{kind: augment, in: images, shift: 1, erase: 0.3, noise: 0.1}}
    encoder: {{kind: encoder, in: views, width: 16}}
    projector: {{kind: projector, in: encoder, hidden: 16, width: 8}}
    predictor: {{kind: predictor, in: projector, hidden: 16, width: 8}}
    target: {{kind: ema_copy, in: views, of: [encoder, projector], decay: 0.9}}
    loss: {{kind: cosine_regression_loss, in: [predictor, target]}}
mesh: {{data: 1}}
pretrain:
  steps: 12
  batch_size: 16
  log_every: 4
  schedule: {{peak_lr: 1.0e-3, min_lr: 1.0e-4}}
runtime: {{checkpoint: {{every_steps: 5}}}}
probe: {{features: encoder, labels_per_class: [4], draws: 3}}
"""
ROAD = ["arrays", "pretrain", "probe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A .npz of bars in the upper and in the lower half, as bytes, under names of the user's own."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    kinds = np.arange(80) % 2
    pictures = draw.integers(0, 60, (80, 6, 6)).astype(np.uint8)
    pictures[np.arange(80), draw.integers(0, 3, 80) + 3 * kinds] = 255
    np.savez(folder / "shapes.npz", pictures=pictures, kinds=kinds)
    return folder


def runner(folder: Path, name: str, recipe: str = RECIPE, runs: str = "runs") -> PipelineRunner:
    (folder / f"{name}.yaml").write_text(recipe.format(name=name, folder=folder))
    loaded = load_recipe(folder / f"{name}.yaml")
    return PipelineRunner(loaded, Runs(folder / runs), build_steps(loaded))


@pytest.fixture(scope="module")
def undisturbed(folder) -> PipelineRunner:
    whole = runner(folder, "whole")
    assert [step.name for step in whole.run(Quiet())] == ROAD
    return whole


def summary(done: PipelineRunner, stage: str) -> dict:
    return json.loads((done.folder / stage / "result.json").read_text())


def weights(done: PipelineRunner) -> list[np.ndarray]:
    store = CheckpointStore(done.folder / "pretrain" / "checkpoints")
    return jax.tree.leaves(store.restore(12, {"params": None, "averages": None, "opt_state": None}))


def test_the_users_images_are_split_and_never_leave_their_part(undisturbed):
    counts = summary(undisturbed, "arrays")
    assert (counts["train"]["images"], counts["held_out"]["images"], counts["classes"]) == (60, 20, 2)
    parts = [np.load(undisturbed.folder / "arrays" / part / "images.npy") for part in ("train", "held-out")]
    assert [part.shape for part in parts] == [(60, 6, 6, 1), (20, 6, 6, 1)]
    assert all(part.max() == 1.0 and part.dtype == np.float32 for part in parts)
    rows = {part.tobytes() for part in np.concatenate(parts)}
    assert len(rows) == 80


def test_the_probe_judges_trained_and_untrained_features_and_the_pixels(undisturbed):
    found = summary(undisturbed, "probe")
    assert found["held_out"] == 20 and found["draws"] == 3
    assert [one["labels_per_class"] for one in found["probe"]] == [None, 4]
    for one in found["probe"]:
        assert list(one["scores"]) == ["trained", "random", "pixels"]
        assert all(0 <= score["accuracy"] <= 1 and score["stderr"] >= 0 for score in one["scores"].values())
    assert found["probe"][0]["scores"]["pixels"]["accuracy"] > 0.9  # a straight cut between the halves


def test_images_are_counted_and_the_report_shows_the_probe(undisturbed, tmp_path):
    rows = [json.loads(line) for line in (undisturbed.folder / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [16, 64, 128, 192]
    keys = {key for row in [*rows, summary(undisturbed, "pretrain")] for key in row} - {
        "loss_tokens"
    }  # what the loss counts
    assert not any("token" in key for key in keys)
    shown = write_report(undisturbed.folder, tmp_path / "report.html")
    assert shown["sections"] == ["model", "pretrain", "probe", "predicted", "settings", "stages"]
    page = (tmp_path / "report.html").read_text()
    accuracy = summary(undisturbed, "probe")["probe"][1]["scores"]["trained"]["accuracy"]
    assert "4 of each class" in page and f"{100 * accuracy:.1f}\u202f±" in page.replace("\u00a0", "\u202f")
    assert "images per second" in page and "tokens per second" not in page and "nats per token" not in page


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_interrupted_in_the_middle_it_ends_with_the_same_bits(folder, undisturbed, monkeypatch, how):
    batch = ArrayFeed.batch

    def interrupt(self, step):
        if step == 8 and how == "stopped":
            signal.raise_signal(signal.SIGTERM)
        if step == 8 and how == "killed":  # what a kill leaves: the checkpoint of step 5
            raise SystemExit(137)
        return batch(self, step)

    again = runner(folder, how, runs=how)
    with monkeypatch.context() as patched, pytest.raises((Preempted, SystemExit)):
        patched.setattr(ArrayFeed, "batch", interrupt)
        again.run(Quiet())
    assert [step.name for step in again.plan() if not step.complete] == ROAD[1:]
    again.run(Quiet())
    (resumed,) = summary(again, "pretrain")["resumed_at"]
    assert 5 <= resumed < 12
    for ours, theirs in zip(weights(again), weights(undisturbed), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert summary(again, "probe") == summary(undisturbed, "probe")
    assert again.run(Quiet()) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("images: pictures", "images: picture"), "pictures, kinds"),
        (("[6, 6, 1]", "[8, 8, 1]"), "inputs: {images: [6, 6, 1]}"),
        (("labels: kinds", "labels: none"), "labels"),
        (("features: encoder", "features: encodr"), "`encodr`"),
    ],
)
def test_a_mistake_names_what_to_write(folder, undisturbed, change, named):
    with pytest.raises(UserError) as told:
        runner(folder, "mistaken", RECIPE.replace(*change)).run(Quiet())
    assert named in f"{told.value.what} {told.value.fix}"
