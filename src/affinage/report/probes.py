"""What a probe stage left behind: accuracies of the same probe on several features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from affinage.report.reading import mapping, mappings, number, string, whole


@dataclass(frozen=True)
class ProbeScore:
    """Accuracy on held-out images, with its standard error: over draws of labels, or over images if there is one."""

    features: str
    accuracy: float
    error: float | None


@dataclass(frozen=True)
class Compared:
    """The scores of all features with the same labels; None: all labels there are."""

    labels_per_class: int | None
    scores: tuple[ProbeScore, ...]


@dataclass(frozen=True)
class Probe:
    """Linear probes of the vectors of one node."""

    node: str
    held_out: int | None  # images that the accuracies are of
    draws: int | None  # of few labels, over which accuracies are averaged
    compared: tuple[Compared, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what is compared."""
        return tuple(score.features for score in self.compared[0].scores)


def read_probe(summary: Mapping[str, Any]) -> Probe | None:
    """The summary of a probe stage; None if it has no accuracies."""
    compared = tuple(_compared(entry) for entry in mappings(summary.get("probe")))
    if not compared or len({tuple(score.features for score in one.scores) for one in compared}) > 1:
        return None
    return Probe(string(summary.get("features")), whole(summary.get("held_out")), whole(summary.get("draws")), compared)


def _compared(entry: Mapping[str, Any]) -> Compared:
    scores = []
    for features, found in mapping(entry.get("scores")).items():
        accuracy = number(mapping(found).get("accuracy"))
        if accuracy is not None:
            scores.append(ProbeScore(features, accuracy, number(mapping(found).get("stderr"))))
    return Compared(whole(entry.get("labels_per_class")), tuple(scores))
