"""How well a tokenizer fits the text: bytes per token, tokens per word, and whether decoding gives the text back."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from affinage.data.documents import read_documents
from affinage.data.published_tokenizer import PublishedTokenizer
from affinage.paths import from_home

_BYTES_PER_GROUP = 2_000_000  # enough for three digits of a ratio, encoded and decoded in a second


class Encodes(Protocol):
    """What is measured of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""


def compare(
    tokenizer: Encodes, paths: Sequence[str], split_folder: Path, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure published tokenizers on the same documents as ours.

    Gives `tokenizers`, ours first: for each its `name`, `vocabulary`, and what `measure` gives.
    """
    named: list[tuple[str, Encodes]] = [("", tokenizer)]
    for path in paths:
        published = PublishedTokenizer(from_home(path))
        named.append((published.name, published))
    results = []
    for name, each in named:
        progress(f"measuring {name or 'ours'}")
        results.append({"name": name, "vocabulary": each.vocabulary, **measure(each, split_folder)})
    return {"tokenizers": results}


def measure(tokenizer: Encodes, split_folder: Path) -> dict[str, Any]:
    """Measure on held-out documents (on training ones where none are held out), some 2 MB per source and language.

    Gives `languages` and `sources` {name: {bytes_per_token, tokens_per_word, tokens, words, bytes}} and `round_trip`
    {documents, exact}. A word is what stands between white space.
    """
    seen: dict[tuple[str, str], int] = defaultdict(int)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])  # bytes, tokens, words
    documents = exact = 0
    held_out = next(read_documents(split_folder / "validation"), None) is not None
    for batch in read_documents(split_folder / ("validation" if held_out else "train")):
        chosen = []
        for source, language, text in zip(*(batch.column(name) for name in ("source", "language", "text"))):
            group = (source.as_py(), language.as_py())
            if seen[group] < _BYTES_PER_GROUP:
                seen[group] += len(text.as_py().encode())
                chosen.append((group, text.as_py()))
        for (group, text), ids in zip(chosen, tokenizer.encode_batch([text for _, text in chosen])):
            documents += 1
            exact += tokenizer.decode(ids) == text
            count = counts[group]
            for column, value in enumerate((len(text.encode()), len(ids), len(text.split()))):
                count[column] += value
    return {
        "measured_on": "validation" if held_out else "train",
        "languages": _ratios(counts, 1),
        "sources": _ratios(counts, 0),
        "round_trip": {"documents": documents, "exact": exact},
    }


def _ratios(counts: dict[tuple[str, str], list[int]], key: int) -> dict[str, dict[str, float]]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for group, count in counts.items():
        totals[group[key]] = [a + b for a, b in zip(totals[group[key]], count)]
    return {
        name: {
            "bytes_per_token": n_bytes / max(tokens, 1),
            "tokens_per_word": tokens / max(words, 1),
            "tokens": tokens,
            "words": words,
            "bytes": n_bytes,
        }
        for name, (n_bytes, tokens, words) in sorted(totals.items())
    }
