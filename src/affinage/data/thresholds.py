"""What a threshold of language id costs: how probable the languages of the documents were, by source and language."""

from typing import Any

import numpy as np

GRID = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # thresholds that the report compares; whole hundredths
_BINS = 101  # one per hundredth, rounded down, so that p >= threshold is a question about whole bins
_SEPARATOR = "\n"


class Probabilities:
    """Histograms of the probabilities of documents and of their bytes. Those of parts of the work add up."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = {}  # "<source>\n<language>": int64 [2, bins]

    def add(self, source: str, language: str, probability: float, bytes: int) -> None:
        """Count one document that language id has seen."""
        counts = self._counts.setdefault(source + _SEPARATOR + language, np.zeros((2, _BINS), np.int64))
        counts[:, int(probability * 100)] += 1, bytes

    def merge(self, other: "Probabilities") -> None:
        """Add the counts of another part of the work."""
        for key, counts in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + counts

    def to_json(self) -> dict[str, Any]:
        """All counts, to be read by `from_json`."""
        return {key: counts.tolist() for key, counts in self._counts.items()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Probabilities":
        """What `to_json` wrote."""
        probabilities = Probabilities()
        probabilities._counts = {key: np.array(counts, np.int64) for key, counts in value.items()}
        return probabilities

    def costs(self) -> list[dict[str, Any]]:
        """Of every source and language: documents and bytes, and how many of them each threshold of `GRID` keeps."""
        first = [round(threshold * 100) for threshold in GRID]
        rows = []
        for key, counts in sorted(self._counts.items()):
            source, language = key.split(_SEPARATOR)
            documents, bytes = (row[::-1].cumsum()[::-1] for row in counts)
            rows.append(
                {
                    "source": source,
                    "language": language,
                    "documents": int(documents[0]),
                    "bytes": int(bytes[0]),
                    "documents_kept": documents[first].tolist(),
                    "bytes_kept": bytes[first].tolist(),
                }
            )
        return rows
