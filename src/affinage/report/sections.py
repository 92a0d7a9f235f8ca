"""What the sections of the page show beyond the bare facts: which there are, shares, comparisons, totals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from affinage.report.costs import Node, written_nodes
from affinage.report.differences import Piece, differences, excerpts
from affinage.report.evaluations import Evaluation, Score
from affinage.report.facts import Facts
from affinage.report.neighbours import NearDuplicate
from affinage.report.quantities import ABSENT, Quantities
from affinage.results import DocumentsResult, Size, SplitResult, ThresholdCost, Thresholds

THRESHOLDS = 5  # of language id, shown beside each other


def present(facts: Facts) -> list[str]:
    """Names of the sections that have something to show, in the order of the page."""
    trained = {training.name for training in facts.trainings}
    there = {
        "data": bool(facts.flows),
        "duplicates": bool(facts.near_duplicates),
        "tokenizer": facts.tokenizer is not None,
        "rows": facts.rows is not None,
        "model": bool(graph(facts).nodes),
        "pretrain": "pretrain" in trained,
        "sft": "sft" in trained,
        "dpo": "dpo" in trained,
        "compression": any(evaluation.compression for evaluation in facts.evaluations),
        "scores": any(evaluation.scores for evaluation in (*facts.evaluations, *facts.by_hand)),
        "samples": any(evaluation.prompts for evaluation in facts.evaluations),
        "predicted": any(training.compared for training in facts.trainings),
        "settings": bool(facts.recipe or facts.versions),
        "stages": bool(facts.steps),
    }
    return [name for name, shown in there.items() if shown]


@dataclass(frozen=True)
class FunnelStep:
    """One step of the funnel: widths in percent of the widest step, and how many documents it removed."""

    name: str
    result: DocumentsResult
    held_out: SplitResult
    documents_kept: float
    documents_held_out: float
    documents_lost: list[tuple[str, int, float]]  # reason, documents, percent
    bytes_kept: float
    bytes_held_out: float
    bytes_lost: float

    @property
    def removed(self) -> int:
        """Documents that it removed."""
        return sum(count for _, count, _ in self.documents_lost)


def funnel(flows: Mapping[str, DocumentsResult]) -> list[FunnelStep]:
    """Bars of the data steps on one scale."""
    parts = [(name, flow, flow if isinstance(flow, SplitResult) else SplitResult()) for name, flow in flows.items()]
    # After a step there may be more than before: where long documents are split, or their ends held out.
    documents = max((max(f.documents_in or 0, _accounted(f, held)) for _, f, held in parts), default=0) or 1
    size = (
        max((max(f.bytes_in or 0, (f.bytes_out or 0) + held.validation_bytes) for _, f, held in parts), default=0) or 1
    )
    return [
        FunnelStep(
            name=name,
            result=flow,
            held_out=held,
            documents_kept=100 * (flow.documents_out or 0) / documents,
            documents_held_out=100 * held.validation_documents / documents,
            documents_lost=[(reason, count, 100 * count / documents) for reason, count in flow.reasons],
            bytes_kept=100 * (flow.bytes_out or 0) / size,
            bytes_held_out=100 * held.validation_bytes / size,
            bytes_lost=100 * max(0, (flow.bytes_in or 0) - (flow.bytes_out or 0) - held.validation_bytes) / size,
        )
        for name, flow, held in parts
    ]


def _accounted(flow: DocumentsResult, held_out: SplitResult) -> int:
    return (flow.documents_out or 0) + held_out.validation_documents + sum(count for _, count in flow.reasons)


def by_size(sizes: Mapping[str, Size]) -> list[tuple[str, Size]]:
    """Languages or sources with their sizes, the largest first."""
    return sorted(sizes.items(), key=lambda each: (-(each[1].bytes or 0), each[0]))


def shares_of(sizes: Mapping[str, Size]) -> list[tuple[str, Size, float | None]]:
    """Each language or source with its size and its part of all bytes."""
    total = sum(size.bytes or 0 for size in sizes.values())
    return [(name, size, (size.bytes or 0) / total if total else None) for name, size in by_size(sizes)]


@dataclass(frozen=True)
class ThresholdRow:
    """A source in a language, and for each threshold the shares of its documents and bytes that are kept."""

    cost: ThresholdCost
    used: float | None  # the threshold of the recipe
    cells: list[tuple[float, float, float]]  # threshold, documents, bytes


def thresholds(facts: Facts) -> list[ThresholdRow]:
    """What the thresholds of language id near the one that was used would keep; empty if nothing depended on it."""
    found = facts.filtered.thresholds if facts.filtered else Thresholds()
    used = setting_of(facts, "filter", "data", "filters", "language_threshold")
    by_name = used if isinstance(used, Mapping) else {"default": used}
    rows = []
    for cost in found.costs:
        if cost.documents > 0 and len(cost.documents_kept) == len(cost.bytes_kept) == len(found.grid):
            names = (name for name in (cost.source, cost.language, "default") if name in by_name)
            threshold = by_name.get(next(names, ""))
            kept = zip(found.grid, cost.documents_kept, cost.bytes_kept)
            cells = [(at, some / cost.documents, size / max(cost.bytes, 1)) for at, some, size in kept]
            rows.append(ThresholdRow(cost, threshold if isinstance(threshold, int | float) else None, cells))
    centers = {row.used for row in rows if row.used is not None} or {0.8}
    near = sorted(found.grid, key=lambda at: (min(abs(at - one) for one in centers), at))[:THRESHOLDS]
    return [replace(row, cells=[cell for cell in row.cells if cell[0] in near]) for row in rows]


def setting_of(facts: Facts, step: str, *keys: str) -> Any:
    """A setting that decided the result of a step; None if it is not known."""
    found = facts.step(step)
    value: Any = found.manifest.settings if found else None
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class Pair:
    """Two near-duplicate documents with what differs marked; `same` if the excerpts do not differ at all."""

    facts: NearDuplicate
    kept: list[Piece]
    removed: list[Piece]

    @property
    def same(self) -> bool:
        """Whether nothing differs in what is shown."""
        return not any(differs for _, differs in (*self.kept, *self.removed))


def pairs(found: Sequence[NearDuplicate]) -> list[Pair]:
    """The pairs, compared around their first difference."""
    return [Pair(one, *differences(*excerpts(one.kept_text, one.removed_text))) for one in found]


@dataclass(frozen=True)
class GraphFacts:
    """The nodes of the model; totals are None where the run did not say."""

    nodes: tuple[Node, ...]
    parameters: int | None
    flops: int | None
    context: int | None  # tokens of the row whose forward pass `flops` counts

    @property
    def shapes(self) -> bool:
        """Whether any node's output shape is known."""
        return any(node.shape for node in self.nodes)


def graph(facts: Facts) -> GraphFacts:
    """Nodes as the training analysed them, or else as the recipe writes them."""
    trained = next((training for training in facts.trainings if training.nodes), None)
    nodes = trained.nodes if trained else written_nodes(facts.settings.model.nodes)
    parameters = sum(node.parameters or 0 for node in nodes)
    flops = sum(node.flops or 0 for node in nodes)
    return GraphFacts(nodes, parameters or None, flops or None, trained.context if trained else None)


def epochs(facts: Facts) -> float | None:
    """How often pretraining read the training set: rows for rows, as the tokens it read are those of padding too."""
    pretrain = facts.training("pretrain")
    rows = facts.rows
    slots = (rows.train.rows or 0) * (rows.context or 0) if rows else 0
    tokens = slots or (rows.train.tokens if rows else None)
    return pretrain.tokens / tokens if pretrain and pretrain.tokens and tokens else None


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task across models, written out.

    `change` is the paired difference of the last model from the first, over the items that both answered; `significant`
    says that chance rarely makes one this large. There is none between scores with and without the chat template.
    """

    task: str
    metric: str
    values: list[str]
    change: str
    significant: bool
    chance: str
    items: int | None
    shots: int | None


def score_rows(evaluations: Sequence[Evaluation], words: dict[str, str], quantities: Quantities) -> list[ScoreRow]:
    """All metrics of all tasks in the order in which they were first seen."""
    names = dict.fromkeys((score.task, score.metric) for evaluation in evaluations for score in evaluation.scores)
    rows = []
    differences = evaluations[0].differences_to(evaluations[-1]) if len(evaluations) > 1 else {}
    for task, metric in names:
        found = [evaluation.score(task, metric) for evaluation in evaluations]
        known = [score for score in found if score]
        alike = len({score.chat_template for score in known}) == 1
        paired = differences.get((task, metric)) if alike else None
        rows.append(
            ScoreRow(
                task=task,
                metric=metric,
                values=[_written_score(score, words, quantities) if score else ABSENT for score in found],
                change=ABSENT if paired is None else _signed(paired.difference, known[0].is_share, words, quantities),
                significant=paired is not None and paired.is_real,
                chance=quantities.percent(known[0].chance, 0),
                items=known[0].items,
                shots=known[0].shots,
            )
        )
    return rows


def _written_score(score: Score, words: dict[str, str], quantities: Quantities) -> str:
    written = quantities.with_error(score.value, score.stderr, as_percent=score.is_share)
    return f"{written} ({words['in_chat']})" if score.chat_template else written


def _signed(difference: float, is_share: bool, words: dict[str, str], quantities: Quantities) -> str:
    size = abs(difference)
    written = f"{quantities.decimal(100 * size, 1)} {words['points']}" if is_share else quantities.number(size)
    return ("+" if difference > 0 else "−" if difference < 0 else "") + written


@dataclass(frozen=True)
class ShownSample:
    """A prompt and what followed. `continuation` is the text without the prompt, if the model repeated it."""

    prompt: str
    text: str
    chat: bool

    @property
    def continuation(self) -> str:
        """What the model added to the prompt."""
        return self.text.removeprefix(self.prompt)


def samples(facts: Facts) -> list[ShownSample]:
    """Samples of all models, each once."""
    found = (
        ShownSample(one.prompt or one.question, one.text, chat)
        for evaluation in facts.evaluations
        for one, chat in evaluation.prompts
    )
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class StripPart:
    """A stage's part of the time of the run, in percent."""

    name: str
    seconds: float
    percent: float
    group: str


_GROUPS = {
    "pretrain": "training",
    "sft-data": "training",
    "sft": "training",
    "preference-data": "training",
    "ref-logprobs": "training",
    "dpo": "training",
    "evaluate-base": "evaluation",
    "evaluate-sft": "evaluation",
    "evaluate-dpo": "evaluation",
    "export": "release",
    "report": "release",
}
GROUPS = ("data", "training", "evaluation", "release")


def strip(facts: Facts) -> list[StripPart]:
    """The stages that took time, as parts of the whole."""
    timed = [(step.name, step.seconds) for step in facts.steps if step.seconds]
    total = sum(seconds for _, seconds in timed)
    return [StripPart(name, seconds, 100 * seconds / total, _GROUPS.get(name, "data")) for name, seconds in timed]


def time_by_group(parts: Sequence[StripPart]) -> dict[str, float]:
    """Seconds of each kind of work that there was."""
    spent = {group: sum(part.seconds for part in parts if part.group == group) for group in GROUPS}
    return {group: seconds for group, seconds in spent.items() if seconds}
