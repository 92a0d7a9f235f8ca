"""What the report says of cleaning beyond counts: what a threshold of language id costs, and benchmarks in the text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from affinage.report.reading import listing, mapping, mappings, number, string, whole

MATCHES_SHOWN = 5
THRESHOLDS_SHOWN = 5


@dataclass(frozen=True)
class ThresholdCost:
    """Documents of one source in one language, and the shares of them and of their bytes that each threshold keeps."""

    source: str
    language: str
    documents: int
    documents_kept: tuple[float, ...]
    bytes_kept: tuple[float, ...]
    asked: float | None  # the threshold that was used


@dataclass(frozen=True)
class Thresholds:
    """The thresholds that are compared, and a row per source and language."""

    grid: tuple[float, ...]
    costs: tuple[ThresholdCost, ...]

    @property
    def shown(self) -> tuple[int, ...]:
        """The places in the grid of the thresholds that a page has room for: the nearest to those that were used."""
        asked = {cost.asked for cost in self.costs if cost.asked is not None} or {0.8}
        near = sorted(range(len(self.grid)), key=lambda k: (min(abs(self.grid[k] - one) for one in asked), k))
        return tuple(sorted(near[:THRESHOLDS_SHOWN]))


@dataclass(frozen=True)
class Benchmark:
    """How much of one benchmark is in the text."""

    name: str
    items: int | None
    too_short: int | None
    found: int | None
    documents: int | None


@dataclass(frozen=True)
class Match:
    """A document and an item that have words in common."""

    document: str
    source: str
    benchmark: str
    item: str
    text: str


@dataclass(frozen=True)
class Contamination:
    """What decontamination looked for and found."""

    benchmarks: tuple[Benchmark, ...]
    matches: tuple[Match, ...]
    ngram: int | None
    boilerplate: int


def read_thresholds(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Thresholds | None:
    """What step `filter` records about thresholds; None if language id was off or nothing depended on it."""
    found = mapping(summary.get("thresholds"))
    grid = tuple(value for value in map(number, listing(found.get("grid"))) if value is not None)
    asked = mapping(mapping(settings.get("data")).get("filters"))
    asked_threshold = asked.get("language_threshold")
    of_each = asked_threshold if isinstance(asked_threshold, Mapping) else {"default": asked_threshold}
    costs = []
    for row in mappings(found.get("costs")):
        documents, bytes = whole(row.get("documents")) or 0, whole(row.get("bytes")) or 0
        by_documents, by_bytes = _shares(row.get("documents_kept"), documents), _shares(row.get("bytes_kept"), bytes)
        if documents > 0 and len(by_documents) == len(by_bytes) == len(grid):
            source = string(row.get("source"))
            language = string(row.get("language"))
            threshold = number(next((of_each[key] for key in (source, language, "default") if key in of_each), None))
            costs.append(ThresholdCost(source, language, documents, by_documents, by_bytes, threshold))
    return Thresholds(grid, tuple(costs)) if costs else None


def _shares(kept: Any, total: int) -> tuple[float, ...]:
    return tuple((number(value) or 0.0) / max(total, 1) for value in listing(kept))


def read_contamination(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Contamination | None:
    """What stage `decontaminate` found; None if it looked for nothing."""
    benchmarks = tuple(
        Benchmark(name, *(whole(mapping(facts).get(key)) for key in ("items", "too_short", "found", "documents")))
        for name, facts in mapping(summary.get("benchmarks")).items()
    )
    matches = tuple(
        Match(*(str(match.get(key) or "") for key in ("document", "source", "benchmark", "item", "text")))
        for match in mappings(summary.get("matches"))
    )
    if not benchmarks:
        return None
    ngram = whole(mapping(mapping(settings.get("data")).get("decontaminate")).get("n_grams"))
    left_out = mapping(summary.get("boilerplate"))
    boilerplate = (whole(left_out.get("in_items")) or 0) + (whole(left_out.get("in_documents")) or 0)
    return Contamination(benchmarks, matches[:MATCHES_SHOWN], ngram, boilerplate)
