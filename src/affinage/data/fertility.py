"""How well a tokenizer fits the text: bytes per token, tokens per word, and whether decoding gives the text back."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from affinage.data.documents import read_documents
from affinage.data.tokenizer import FILE, Tokenizer
from affinage.paths import from_home

_BYTES_PER_GROUP = 2_000_000  # enough for three digits of a ratio, encoded and decoded in a second


def compare(
    tokenizer: Tokenizer, paths: Sequence[str], split_folder: Path, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure published tokenizers, folders or files `tokenizer.json`, on the same documents as the recipe's own.

    Returns `tokenizers`, the recipe's first: for each its `name`, `vocabulary`, and what `measure` returns.
    """
    results = []
    for path in ("", *paths):
        folder = from_home(path)
        folder = folder.parent if folder.name == FILE else folder
        progress(f"measuring {folder.name or 'the trained tokenizer'}")
        each = Tokenizer.load(folder) if path else tokenizer
        name = folder.name or folder.resolve().name if path else ""
        results.append({"name": name, "vocabulary": each.vocabulary, **measure(each, split_folder)})
    return {"tokenizers": results}


def measure(tokenizer: Tokenizer, split_folder: Path) -> dict[str, Any]:
    """Measure on held-out documents (on training ones where none are held out), about 2 MB per source and language.

    Returns `languages` and `sources` {name: {bytes_per_token, tokens_per_word, tokens, words, bytes}} and `round_trip`
    {documents, exact}. A word is what stands between white space.
    """
    counts: dict[str, dict[str, Counter[str]]] = {"languages": {}, "sources": {}}
    read: Counter[tuple[str, str]] = Counter()
    documents = exact = 0
    held_out = next(read_documents(split_folder / "validation"), None) is not None
    for batch in read_documents(split_folder / ("validation" if held_out else "train")):
        chosen = []
        for source, language, text in zip(*(batch.column(name) for name in ("source", "language", "text"))):
            group = (source.as_py(), language.as_py())
            if read[group] < _BYTES_PER_GROUP:
                read[group] += len(text.as_py().encode())
                chosen.append((group, text.as_py()))
        for ((source, language), text), ids in zip(chosen, tokenizer.encode_batch([text for _, text in chosen])):
            documents += 1
            exact += tokenizer.decode(ids) == text
            count = {"tokens": len(ids), "words": len(text.split()), "bytes": len(text.encode())}
            counts["sources"].setdefault(source, Counter()).update(count)
            counts["languages"].setdefault(language, Counter()).update(count)
    ratios = {key: {name: _ratios(count) for name, count in sorted(of.items())} for key, of in counts.items()}
    round_trip = {"documents": documents, "exact": exact}
    return {"measured_on": "validation" if held_out else "train", **ratios, "round_trip": round_trip}


def _ratios(count: Counter[str]) -> dict[str, float]:
    return {
        "bytes_per_token": count["bytes"] / max(count["tokens"], 1),
        "tokens_per_word": count["tokens"] / max(count["words"], 1),
        **count,
    }
