"""Sick steps: seen on the devices, left out or gone back from, told with their documents, and stopped in time."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.errors import UserError
from affinage.model import Call, init_params
from affinage.model.preferred import preference_graph
from affinage.recipe.training import HealthSettings, TrainSettings
from affinage.recipe.tuning import DpoSettings
from affinage.training import TrainJob, train
from affinage.training.diagnosis import diagnose
from affinage.training.health import Health, Incurable
from affinage.training.progress import step_line
from affinage.training.spikes import LossWindow, judged


class SickFeed(tiny.RandomFeed):
    """Batches of the given steps, counted from 1, lead to a loss that is not finite, or to a spike of it."""

    def __init__(self, not_finite: tuple[int, ...] = (), spikes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._not_finite, self._spikes = not_finite, spikes

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        if step + 1 in self._not_finite:
            batch["loss_mask"] = np.full_like(batch["loss_mask"], np.nan)
        if step + 1 in self._spikes:
            batch["tokens"] = np.full_like(batch["tokens"], tiny.VOCABULARY - 1)
        return batch


def job(folder: Path, feed: SickFeed, steps: int = 15, every: int = 5, hook=None, **health: object) -> TrainJob:
    return TrainJob(
        graph=tiny.graph(layers=1),
        settings=tiny.settings(steps, checkpoint={"every_steps": every}, health=health),
        mesh={"data": 1},
        seed=1,
        feed=feed,
        folder=folder,
        documents=lambda step: [f"document {step}"],
        on_step=(hook,) if hook else (),
    )


def params(folder: Path, step: int) -> list[bytes]:
    state = CheckpointStore(folder / "checkpoints").restore(step, {"params": None, "opt_state": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]


def series(steps: int, seed: int) -> np.ndarray:
    """Losses as of a training: a fall from 10 to 3, noise that has heavy tails and shrinks, and slow waves."""
    draw, at = np.random.default_rng(seed), np.arange(steps)
    level = 3 + 7 * (1 + at / 200) ** -0.5 + 0.02 * np.sin(at / 3000)
    return (level * (1 + 0.01 * draw.standard_t(8, steps))).astype(np.float32)


@partial(jax.jit, static_argnums=1)
def scores(losses: jax.Array, size: int = 128) -> jax.Array:
    def step(window: LossWindow, loss: jax.Array) -> tuple[LossWindow, jax.Array]:
        return window.with_loss(loss), window.score(loss)

    return jax.lax.scan(step, LossWindow.empty(size), losses)[1]


def expected_score(before: list[float], loss: float) -> float:
    """The larger one of two, in the order of the losses, as `LossWindow` has them."""
    if not before:
        return 0.0
    window, last = np.array(before[-128:], np.float64), np.array(before[-33:], np.float64)
    median = np.median(window)
    least = 0.002 if len(before) >= 16 else 0.25
    above = (loss - median) / max(1.4826 * np.median(np.abs(window - median)), least * median)
    if len(before) < 8:
        return above
    steps, level = np.diff(last), np.median(last[-8:])
    noise = np.quantile(np.abs(steps - np.median(steps)), 0.75) / 1.1503 / np.sqrt(2)
    return max(above, (loss - level) / max(1.75 * noise, 0.03 * level))


@pytest.mark.parametrize("noise", [0.01, 0.1])
@pytest.mark.parametrize("fall", [1, 12, 200])
def test_the_score_is_that_of_numpy(fall: float, noise: float):
    draw, at = np.random.default_rng(0), np.arange(300)
    losses = ((1 + 9 * np.exp(-at / fall)) * (1 + noise * draw.standard_normal(300))).astype(np.float32)
    losses[[30, 41, 45]] = np.nan, np.inf, 20.0
    got, seen = np.asarray(scores(losses)), []
    for step, loss in enumerate(losses):
        np.testing.assert_allclose(got[step], expected_score(seen, loss), rtol=2e-3, atol=1e-3)
        if np.isfinite(loss):
            seen.append(loss)


@pytest.mark.parametrize("size", [8, 9, 31, 33])
def test_a_window_of_any_size_forgets_what_is_older(size: int):
    late = series(60, 4)[-40:]
    early = [np.concatenate([np.full(15 + size, level, np.float32), late]) for level in (1.0, 9.0)]
    one, other = (np.asarray(scores(losses, size))[-40 + size :] for losses in early)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("step", [1, 2, 7, 15])
def test_a_loss_far_above_the_few_before_it_is_a_spike_and_a_fall_or_a_small_rise_is_none(step: int):
    losses = series(16, 3)
    assert (np.asarray(scores(losses)) < 6).all()
    for factor, spike in ((1.15, False), (1.5, step >= 8), (3.0, True)):
        moved = losses.copy()
        moved[step] *= factor
        assert (np.asarray(scores(moved))[step] > 6) == spike


def test_a_hundred_thousand_clean_steps_do_not_stop_a_run_and_every_spike_is_seen():
    clean = series(100_000, 1)
    spikes = np.asarray(scores(clean)) > 6
    assert spikes.mean() < 1e-3
    assert np.convolve(spikes, np.ones(3), "valid").max() < 3  # the limits of the breaker
    assert np.convolve(spikes, np.ones(100), "valid").max() < 5
    at = np.arange(5_000, 20_000, 497)
    sick = clean[:20_000].copy()
    sick[at] *= 1.15  # thirteen deviations
    assert (np.asarray(scores(sick))[at] > 6).all()


def test_a_spike_in_the_first_steps_is_seen_and_a_clean_start_has_none_in_a_row():
    starts = np.stack([series(128, seed) for seed in range(200)])
    spikes = np.asarray(jax.vmap(scores)(starts)) > 6
    assert not spikes[:, :16].any() and spikes.sum() <= 10 and (spikes.sum(axis=1) < 3).all()
    for step in (16, 20, 40):
        sick = starts.copy()
        sick[:, step] *= 3
        assert (np.asarray(jax.vmap(scores)(sick))[:, step] > 6).mean() > 0.99


def falls(steps: int, runs: int, each: float) -> tuple[np.ndarray, np.ndarray]:
    """Losses that go from 4 to 0, by a factor of e in so many steps, and the deviation of their noise."""
    level = 4 * np.exp(-np.arange(steps) / each) + 0.02
    noise = np.broadcast_to(0.04 * level, (runs, steps))
    draw = np.random.default_rng(5).standard_normal((runs, steps))
    return (level + noise * draw).astype(np.float32), noise.astype(np.float32)


@pytest.mark.parametrize(("each", "deviations"), [(20, 48), (40, 32)])
def test_a_spike_in_a_steep_fall_stands_out_of_the_noise_around_it(each: float, deviations: float):
    clean, noise = falls(300, 50, each)
    assert (np.asarray(jax.vmap(scores)(clean)) < 6).all()
    for step in (20, 35, 50, 65, 80):  # of the deviation of the window, which is that of the fall, none is six
        sick = clean.copy()
        sick[:, step] += deviations * noise[:, step]
        assert (np.asarray(jax.vmap(scores)(sick))[:, step] > 6).mean() > 0.95


def test_noise_that_grows_while_a_model_begins_to_learn_is_no_spike():
    at = np.arange(128)
    level = 3 + 1.85 / (1 + np.exp((at - 40) / 10))
    noise = np.minimum(0.02 * 2 ** np.maximum((at - 10) / 14, 0), 0.25)  # twofold every 14 steps, as in recorded starts
    clean = (level + noise * np.random.default_rng(6).standard_normal((500, 128))).astype(np.float32)
    assert (np.asarray(jax.vmap(scores)(clean)) < 6).all()


def test_three_spikes_shortly_before_do_not_hide_one_in_a_fall():
    clean, noise = falls(128, 50, 40)
    clean[:, [40, 43, 46]] *= 10
    clean[:, 48] += 64 * noise[:, 48]
    spikes = np.asarray(jax.vmap(scores)(clean)) > 6
    assert spikes[:, [40, 43, 46]].all() and spikes[:, 48].mean() > 0.9


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipped")
    train(job(folder, SickFeed(not_finite=(8,))))
    return folder


def test_a_skipped_update_is_written_down_with_its_documents(skipped: Path):
    (event,) = events(skipped)
    assert event["step"] == 8 and event["cause"] == "not finite" and event["done"] == "skipped"
    assert event["documents"] == ["document 8"] and event["learning_rate"] > 0


def test_going_back_and_leaving_the_batch_out_is_the_same_as_never_having_made_the_update(
    tmp_path: Path, skipped: Path
):
    seen = []
    hook = lambda step, state: seen.append(step)  # noqa: E731
    summary = train(job(tmp_path, SickFeed(not_finite=(8,)), hook=hook, on_non_finite="rewind"))
    seen_late = seen[7:-10]  # steps may be in flight when the metrics of one are looked at
    assert seen[:7] == [*range(1, 8)] and seen_late in ([8], [8, 9], [8, 9, 10]) and seen[-10:] == [*range(6, 16)]
    assert summary["health"]["left_out"] == [8] and summary["health"]["rewinds"] == [[8, 5]]
    assert summary["seconds"]["lost"] > 0
    assert params(tmp_path, 15) == params(skipped, 15)
    (event,) = events(tmp_path)
    assert event["done"] == "rewound to 5" and event["documents"] == {"8": ["document 8"]}
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [step for step in range(1, 16) if step != 8]


def test_what_was_left_out_stays_out_when_the_run_is_started_again(tmp_path: Path, skipped: Path):
    def fall(step: int, state: object) -> None:
        if step == 12:
            raise RuntimeError("the machine fails")

    feed = SickFeed(not_finite=(8,))
    with pytest.raises(RuntimeError):
        train(job(tmp_path, feed, hook=fall, on_non_finite="rewind"))
    summary = train(job(tmp_path, feed, on_non_finite="rewind"))
    assert summary["resumed_at"] == [10]
    assert summary["health"]["left_out"] == [8] and len(summary["health"]["rewinds"]) == 1
    assert params(tmp_path, 15) == params(skipped, 15)


def test_a_start_before_the_sick_step_of_a_rewind_forgets_neither_the_rewind_nor_its_line(tmp_path: Path):
    def fall(step: int, state: object) -> None:
        if step == 11 and (tmp_path / "health.jsonl").exists():
            raise RuntimeError("the machine fails")

    feed, how = SickFeed(not_finite=(13,)), {"on_non_finite": "rewind", "rewind_batches": 8}
    with pytest.raises(RuntimeError):
        train(job(tmp_path, feed, hook=fall, **how))
    summary = train(job(tmp_path, feed, **how))
    assert summary["resumed_at"] == [10] and summary["health"]["rewinds"] == [[13, 5]]
    (event,) = events(tmp_path)
    assert event["step"] == 13 and event["left_out"] == [*range(6, 14)]


def test_three_in_a_row_stop_the_run_with_a_diagnosis_also_across_starts(tmp_path: Path):
    def fall(step: int, state: object) -> None:
        if step == 6:
            raise RuntimeError("the machine fails")

    feed = SickFeed(not_finite=(5, 6, 7))
    with pytest.raises(RuntimeError):
        train(job(tmp_path, feed, every=1, hook=fall))
    with pytest.raises(UserError, match="3 updates in a row") as stopped:
        train(job(tmp_path, feed, every=1))
    assert "first: the value of loss" in str(stopped.value) and "document 7" in str(stopped.value)
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["step"] == 7 and found["learning_rate"] > 0 and set(found["gradient_norms"]) >= {"embed", "blocks"}


def test_a_training_on_preferences_with_a_held_reference_is_diagnosed_too(tmp_path: Path):
    common = tiny.settings(5, health={"most_in_a_row": 2}).model_dump(include=set(TrainSettings.model_fields))
    chosen = DpoSettings.model_validate({**common, "sources": ["none"], "reference": "held"})
    graph = preference_graph(tiny.graph(layers=1), chosen, documents=2)
    feed = SickFeed(not_finite=(2, 3))
    with pytest.raises(UserError, match="2 updates in a row"):
        train(TrainJob(graph=graph, settings=chosen, mesh={"data": 1}, seed=1, feed=feed, folder=tmp_path))
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["step"] == 3 and found["first"] == "the value of answer_log_probabilities"


def test_too_many_among_the_last_steps_stop_it_too(tmp_path: Path):
    with pytest.raises(UserError, match="2 updates within 5 steps"):
        train(job(tmp_path, SickFeed(not_finite=(3, 9, 12)), every=99, most=2, within=5))
    assert [event["done"] for event in events(tmp_path)] == ["skipped", "skipped", "stopped"]


@pytest.mark.parametrize(
    ("sick", "opens"),
    [
        ([10, 11, 12], "3 updates in a row"),
        ([10, 11, 13, 14], ""),
        ([1, 26, 51, 76, 100], "5 updates within 100 steps"),
        ([1, 34, 67, 100], ""),
        ([1, 26, 51, 76, 101], ""),
    ],
    ids=["3 in a row", "2 in a row", "5 in 100", "4 in 100", "5 in 101"],
)
def test_by_default_3_in_a_row_or_5_in_100_are_too_many(tmp_path: Path, sick: list[int], opens: str):
    health = Health(HealthSettings(), tmp_path, 0, {})
    for step in sick[:-1]:
        health.look(step, {"skipped": 1.0, "loss": float("nan")})
    with pytest.raises(Incurable, match=opens) if opens else contextlib.nullcontext():
        health.look(sick[-1], {"skipped": 1.0, "loss": float("nan"), "grad_norm": float("nan")})


@pytest.mark.parametrize("sick", ["loss", "gradient"])
def test_what_is_not_finite_is_no_spike_and_stops_a_run_that_notes_spikes_only(tmp_path: Path, sick: str):
    settings, window = HealthSettings(window=8, on_spike="note"), LossWindow.empty(8)
    for loss in np.linspace(3.0, 2.9, 8, dtype=np.float32):
        window = window.with_loss(loss)
    loss, norm = (jnp.inf, 1.0) if sick == "loss" else (9.0, jnp.inf)
    _, sound, told = judged(window, jnp.float32(loss), settings)
    assert bool(sound) == (sick == "gradient") and bool(told["spike"]) == (sick == "gradient")
    metrics = {"skipped": 1.0, "loss": loss, "grad_norm": norm, **{name: float(told[name]) for name in told}}
    health = Health(settings, tmp_path, 0, {})
    health.look(10, metrics)
    assert [(event["cause"], event["done"]) for event in events(tmp_path)] == [("not finite", "skipped")]
    row = {name: value if np.isfinite(value) else None for name, value in metrics.items()}
    row |= {"step": 10, "learning_rate": 0.1, "tokens": 1, "tokens_per_second": 1.0, "mfu": None}
    assert "loss or gradient not finite" in step_line(row, steps=10)
    health.look(11, metrics)
    with pytest.raises(Incurable):
        health.look(12, metrics)


@pytest.mark.parametrize("policy", ["note", "skip", "rewind"])
def test_a_spike_is_noted_skipped_or_gone_back_from(tmp_path: Path, policy: str):
    summary = train(job(tmp_path, SickFeed(spikes=(13,)), window=16, on_spike=policy))
    (event,) = events(tmp_path)
    assert event["step"] == 13 and event["cause"] == "spike" and event["loss_z"] > 6
    assert event["done"] == {"note": "noted", "skip": "skipped", "rewind": "rewound to 10"}[policy]
    assert summary["skipped_updates"] == (policy == "skip")
    assert summary["health"]["left_out"] == ([13] if policy == "rewind" else [])


def test_the_diagnosis_names_the_layer_in_which_a_value_is_no_longer_finite():
    graph, batch = tiny.graph(layers=3), tiny.RandomFeed().batch(0)
    params = init_params(graph, jax.random.key(0))
    assert diagnose(graph, Call(), params, None, batch)["first"] == "nothing"
    grown = jax.tree.map(lambda w: w.at[1].mul(1e30) if w.ndim > 2 else w, params["blocks"])
    found = diagnose(graph, Call(), {**params, "blocks": grown}, None, batch)
    assert found["first"] == "the value of blocks, layer 2 of 3"
    lost = {**params, "norm": {"scale": params["norm"]["scale"].at[3].set(jnp.nan)}}
    assert diagnose(graph, Call(), lost, None, batch)["first"] == "the weights of norm"
    lost = jax.tree.map(lambda w: w.at[2].set(jnp.nan), params["blocks"])
    found = diagnose(graph, Call(), {**params, "blocks": lost}, None, batch)
    assert found["first"] == "the weights of blocks, layer 3 of 3"


def test_the_diagnosis_names_the_layer_in_which_a_gradient_is_no_longer_finite(monkeypatch: pytest.MonkeyPatch):
    graph, batch = tiny.graph(layers=4), tiny.RandomFeed().batch(0)
    params = init_params(graph, jax.random.key(0))
    block = type(next(node for node in graph.nodes if node.name == "blocks").kind)
    apply = block.apply

    def with_a_root(kind: Any, weights: Any, inputs: tuple[Any, ...], context: Any) -> Any:
        """Its value is finite where the weights are 0, its gradient is not."""
        result = apply(kind, weights, inputs, context)
        return replace(result, value=result.value + jnp.sqrt(jnp.abs(weights["ffn_norm"]["scale"]))[None, None])

    monkeypatch.setattr(block, "apply", with_a_root)
    params["blocks"]["ffn_norm"]["scale"] = params["blocks"]["ffn_norm"]["scale"].at[jnp.array([1, 2])].set(0.0)
    assert diagnose(graph, Call(), params, None, batch)["first"] == "the gradient of blocks, layer 3 of 4"


def test_it_goes_back_to_before_the_first_batch_that_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    suspected = (7, 8, 9, 10, 11)
    train(job(tmp_path / "skipped", SickFeed(not_finite=suspected), most_in_a_row=9, most=9))
    feed = SickFeed(not_finite=(11,))
    limits = {"most_in_a_row": 9, "most": 9}
    summary = train(job(tmp_path / "rewound", feed, on_non_finite="rewind", rewind_batches=5, **limits))
    assert summary["health"]["left_out"] == [*suspected] and summary["health"]["rewinds"] == [[11, 5]]
    for step in (10, 15):  # the one of step 10 was there when the run went back, and is another now
        assert params(tmp_path / "rewound", step) == params(tmp_path / "skipped", step)
    assert "step 11 was not sound: back to step 5\n" in capsys.readouterr().out


def test_batches_that_no_checkpoint_comes_before_are_told(tmp_path: Path):
    said: list[str] = []
    settings = HealthSettings(on_non_finite="rewind", rewind_batches=4)
    health = Health(settings, tmp_path, 0, {}, say=said.append)
    health.look(7, {"skipped": 1.0, "loss": float("nan")})
    assert health.last_sound == 3
    health.rewound(5)
    assert health.left_out == [6, 7] and health.rewinds == [[7, 5]]
    assert said == ["step 7 was not sound: back to step 5, the first one there is: batches 4 to 5 stay in"]


def test_a_run_that_goes_back_no_more_says_so(tmp_path: Path):
    said: list[str] = []
    settings = HealthSettings(on_non_finite="rewind", most_in_a_row=99, most=99)
    health = Health(settings, tmp_path, 0, {"rewinds": [[step, step - 1] for step in range(1, 11)]}, say=said.append)
    health.look(30, {"skipped": 1.0, "loss": float("nan")})
    assert health.rewind_from is None and events(tmp_path)[0]["done"] == "skipped"
    assert said == ["step 30 was not sound, and is left out: it has gone back 10 times already"]
