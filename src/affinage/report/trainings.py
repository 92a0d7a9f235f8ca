"""What a training stage left behind: its curves, its summary, and what was predicted of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.report.charts import Point
from affinage.report.costs import Node, node_costs
from affinage.report.evaluations import headline
from affinage.report.forecasts import predicted
from affinage.report.reading import json_file, json_lines, listing, mapping, mappings, number, string, whole

CURVES = (
    *("loss", "learning_rate", "tokens_per_second", "images_per_second", "grad_norm", "mfu"),
    *("expert_load_max", "dropped_share"),
)


@dataclass(frozen=True)
class Validated:
    """Loss (nats per token, or pair) and bits per UTF-8 byte on one validation set, the last time it was read."""

    name: str
    loss: float | None
    bits_per_byte: float | None
    pairs_right: float | None = None  # share of the pairs of which it prefers the better one


@dataclass(frozen=True)
class Worse:
    """A benchmark that is worse after a step than it was: both scores, and the probability that chance does so much."""

    task: str
    step: int
    than: int  # an earlier step
    before: float | None
    now: float | None
    p: float | None


@dataclass(frozen=True)
class Look:
    """What benchmarks said after a step: task -> (the score that is reported of it, standard error, whether worse)."""

    step: int
    scores: Mapping[str, tuple[float | None, float | None, bool]]


@dataclass(frozen=True)
class Compared:
    """One quantity as it was predicted and as it was measured."""

    quantity: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Saves:
    """How often the state was saved, and for how many seconds a save stalled the loop."""

    count: int
    mean: float
    most: float


@dataclass(frozen=True)
class Training:
    """One training stage. Curves map a metric to (step, value); `validation` does so per validation set."""

    name: str
    parameters: int | None
    flops_per_step: float | None
    tokens: int | None
    images: int | None  # instead of tokens, where the model sees images
    steps: int | None
    seconds: Mapping[str, float]  # by account: see `affinage.training.ledger`, and total
    tokens_per_second: float | None
    mfu: float | None
    first_loss: float | None
    final_loss: float | None
    devices: str
    device_count: int | None
    resumed_at: tuple[int, ...]
    curves: Mapping[str, list[Point]]
    validation: Mapping[str, list[Point]]
    validated: tuple[Validated, ...]
    compared: tuple[Compared, ...]
    nodes: tuple[Node, ...]
    context: int | None
    skipped_updates: int
    saves: Saves | None
    looks: tuple[Look, ...]  # at benchmarks, while it was trained
    watched: bool  # whether they were looked at to end it
    bits_per_byte: Mapping[str, list[Point]]  # of the validation text of a language
    worse: tuple[Worse, ...]  # benchmarks that are worse than they were: of each the last look that said so
    ended: str  # why it ended before its last step
    broken_steps: tuple[int, ...]  # steps whose loss was not a finite number

    @property
    def worked(self) -> float | None:
        """Seconds from its first start to its end, without those between two starts."""
        return worked(self.seconds)

    @property
    def loss_kind(self) -> str:
        """What its loss is of, as the words of axes begin: tokens, pairs of answers, or images."""
        return "image_loss" if self.images else "pair_loss" if self.name == "dpo" else "loss"


def worked(accounts: Mapping[str, float]) -> float | None:
    """Of a training's accounts, see `affinage.training.ledger`: all but the time in which it was stopped."""
    total = accounts.get("total")
    return None if total is None else total - accounts.get("paused", 0.0)


def read_training(
    name: str, folder: Path, stage_summary: Mapping[str, Any], recipe: Mapping[str, Any] | None = None
) -> Training:
    """Reads metrics.jsonl and summary.json of a training stage; the stage's own summary fills what is missing.

    What is predicted is computed here and now, from the recipe of the run.
    """
    summary = {**stage_summary, **json_file(folder / "summary.json")}
    nodes, context = node_costs(folder)
    curves, validation, broken = _curves(folder / "metrics.jsonl")
    told = mappings(json_file(folder / "watch.json").get("looks"))
    watched = tuple(map(_look, told))
    evaluated, bits = _evaluated(folder / "metrics.jsonl")
    parameters = summary.get("parameters")
    return Training(
        name=name,
        parameters=whole(mapping(parameters).get("total")) if isinstance(parameters, Mapping) else whole(parameters),
        flops_per_step=number(summary.get("flops_per_step")),
        tokens=whole(summary.get("tokens")),
        images=whole(summary.get("images")),
        steps=whole(summary.get("steps")),
        seconds=read_accounts(summary),
        tokens_per_second=number(summary.get("tokens_per_second")),
        mfu=number(summary.get("mfu")),
        first_loss=number(summary.get("first_loss")),
        final_loss=number(summary.get("final_loss")),
        devices=_devices(summary.get("devices")),
        device_count=whole(mapping(summary.get("devices")).get("count")),
        resumed_at=tuple(step for step in map(whole, listing(summary.get("resumed_at"))) if step),
        curves=curves,
        validation=validation,
        validated=tuple(
            Validated(k, *(number(mapping(v).get(key)) for key in ("loss", "bits_per_byte", "rewards/accuracies")))
            for k, v in mapping(summary.get("validation")).items()
        ),
        compared=_compared(summary, predicted(name, folder, summary, recipe or {})),
        nodes=nodes,
        context=context,
        skipped_updates=whole(summary.get("skipped_updates")) or 0,
        saves=_saves(summary.get("saves")),
        looks=watched or evaluated,
        watched=bool(watched),
        bits_per_byte=bits,
        worse=tuple(_worse(told, {look.step: look for look in watched})),
        ended=string(summary.get("ended")),
        broken_steps=tuple(broken),
    )


def read_accounts(summary: Mapping[str, Any]) -> dict[str, float]:
    """Where the seconds of a training went; nothing of another stage's summary."""
    found = ((name, number(seconds)) for name, seconds in mapping(summary.get("seconds")).items())
    return {name: seconds for name, seconds in found if seconds is not None}


def _saves(told: Any) -> Saves | None:
    count, mean = whole(mapping(told).get("count")), number(mapping(told).get("stall_mean"))
    most = number(mapping(told).get("stall_most"))
    return Saves(count, mean, most) if count and mean is not None and most is not None else None


def _look(entry: Mapping[str, Any]) -> Look:
    worse = {string(one.get("task")) for one in mappings(entry.get("worse"))}
    scores = {
        task: (number(mapping(score).get("value")), number(mapping(score).get("stderr")), task in worse)
        for task, score in mapping(entry.get("scores")).items()
    }
    return Look(whole(entry.get("step")) or 0, scores)


def _worse(told: Sequence[Mapping[str, Any]], looks: Mapping[int, Look]) -> Iterator[Worse]:
    found: dict[str, Worse] = {}
    for entry in told:
        step = whole(entry.get("step")) or 0
        surest = sorted(mappings(entry.get("worse")), key=lambda one: -(number(one.get("p")) or 0.0))
        for one in surest:
            task, than = string(one.get("task")), whole(one.get("than")) or 0
            before, now = (looks[at].scores.get(task) if at in looks else None for at in (than, step))
            found[task] = Worse(task, step, than, before and before[0], now and now[0], number(one.get("p")))
    yield from found.values()


def _evaluated(path: Path) -> tuple[tuple[Look, ...], dict[str, list[Point]]]:
    """The benchmarks scored on the way, each by its headline metric, and bits per byte by language."""
    looks: dict[int, Look] = {}
    bits: dict[str, list[Point]] = {}
    for record in json_lines(path):
        step, told = whole(record.get("step")), mapping(record.get("evaluation"))
        if step is None or not told:
            continue
        scores = {}
        for task, metrics in mapping(told.get("tasks")).items():
            score = mapping(mapping(metrics).get(headline(task, mapping(metrics))))
            scores[task] = (number(score.get("value")), number(score.get("stderr")), False)
        looks[step] = Look(step, scores)
        for language, value in mapping(told.get("bits_per_byte")).items():
            if (known := number(value)) is not None:
                bits.setdefault(language, []).append((step, known))
    return tuple(looks.values()), bits


def _curves(path: Path) -> tuple[dict[str, list[Point]], dict[str, list[Point]], list[int]]:
    curves: dict[str, list[Point]] = {}
    validation: dict[str, list[Point]] = {}
    broken = []
    for record in json_lines(path):
        step = number(record.get("step"))
        if step is None:
            continue
        if "loss" in record and number(record["loss"]) is None:
            broken.append(int(step))
        for metric in CURVES:
            value = number(record.get(metric))
            if value is not None:
                curves.setdefault(metric, []).append((step, value))
        for name, entry in mapping(record.get("validation")).items():
            loss = number(mapping(entry).get("loss"))
            if loss is not None:
                validation.setdefault(name, []).append((step, loss))
    return curves, validation, broken


def _devices(value: Any) -> str:
    if isinstance(value, Mapping):
        kind = string(value.get("kind"), value.get("device_kind"), value.get("platform"))
        count = whole(value.get("count"))
        return f"{count}\u00a0×\u00a0{kind}" if count and kind else kind
    if isinstance(value, list | tuple):
        names = [str(item) for item in value]
        return ", ".join(f"{names.count(kind)}\u00a0×\u00a0{kind}" for kind in dict.fromkeys(names))
    return "" if value is None else str(value)


def _compared(summary: Mapping[str, Any], planned: Mapping[str, float]) -> tuple[Compared, ...]:
    """What is predicted, and what the time of the steps says about it."""
    accounts = mapping(summary.get("seconds"))
    spent = [number(accounts.get(name)) for name in ("compute", "data")]
    seconds = sum(each for each in spent if each is not None) or None
    per_step, steps = number(summary.get("flops_per_step")), number(summary.get("steps"))
    measured = {
        "step_seconds": seconds / steps if seconds and steps else None,
        "memory": number(mapping(summary.get("memory")).get("peak_bytes")),
        "parameters": number(mapping(summary.get("parameters")).get("total")),
        "seconds": seconds,
        "flops_per_second": per_step * steps / seconds if per_step and steps and seconds else None,
        "tokens_per_second": number(summary.get("tokens_per_second")),
        "images_per_second": number(summary.get("images_per_second")),
        "mfu": number(summary.get("mfu")),
    }
    said = {name: number(value) for name, value in mapping(summary.get("predicted")).items()}
    said |= planned
    rows = [Compared(q, said.get(q), measured.get(q)) for q in dict.fromkeys((*said, *measured))]
    return tuple(row for row in rows if row.predicted is not None or row.measured is not None)
