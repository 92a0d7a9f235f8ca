"""The model card of a released folder, by huggingface_hub's template engine."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from affinage import __version__
from affinage.generation.model import LoadedModel
from affinage.model.analysis import parameters

_TEMPLATES = Path(__file__).parent / "templates"
_CHAT_INPUTS = """\
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""


@dataclass(frozen=True)
class CardFacts:
    """What a run knows about its model. A section without facts is left out of the card."""

    license: str | None  # SPDX identifier of the weights; None where it is not known
    tuned: bool = False  # to answer in conversations, by sft or dpo; a chat template alone is no sign of that
    language: str = "en"  # of the card: en or fr
    summary: str = ""  # of the run, in one line
    description: str = ""
    command: str = ""  # that makes this model again
    languages: Sequence[str] = ()  # ISO 639-1, of the text
    sources: Sequence[Mapping[str, Any]] = ()  # of the training text: name, licence, documents, bytes
    training: Mapping[str, Any] = field(default_factory=dict)  # label -> value, e.g. {"Tokens": 1_000_000}
    # label ("base", "sft") -> task -> metric -> {"value", "stderr", "chat_template"}
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def model_card(model: LoadedModel, facts: CardFacts, place: str) -> str:
    """Return README.md of a released model; the scores in its metadata for the Hub are those of the last results.

    `place` is the folder or repository that the usage loads.
    """
    tokenizer = model.tokenizer
    # What every training text began with; other tokenizers than affinage's own add it by themselves.
    opening = tokenizer.id_to_piece(tokenizer.bos) if tokenizer.fixed_ids else ""

    def number(value: Any) -> str:
        """A number as readers of the card's language write it; anything else as it is."""
        if not isinstance(value, int | float):
            return str(value)
        written = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        return written if facts.language == "en" else written.replace(",", "\u202f").replace(".", ",")

    def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join(["| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *lines])

    rows: dict[tuple[str, str], dict[str, str]] = {}
    last: list[EvalResult] = []
    for label, result in facts.results.items():
        last = []
        for task, metrics in result.items():
            for metric, score in metrics.items():
                error = "" if score["stderr"] is None else f" ± {number(score['stderr'])}"
                cell = number(score["value"]) + error + (" †" if score.get("chat_template") else "")
                rows.setdefault((task, metric), {})[label] = cell
                last.append(EvalResult("text-generation", task, task, metric, round(score["value"], 4)))
    note = f"  # in training, every text begins with {opening}" if opening else ""
    keys = ("name", "licence", "documents", "bytes")
    metadata = ModelCardData(
        license=facts.license,
        language=list(facts.languages) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["affinage", "jax"] + (["conversational"] if facts.tuned else []),
        model_name=model.name if last else None,
        eval_results=last or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATES / f"card.{facts.language}.md"),
        name=model.name,
        place=place,
        facts=facts,
        parameters=parameters(model.graph).total,
        context=model.context,
        opening=opening,
        inputs=_CHAT_INPUTS if model.chat else f'inputs = tokenizer("{opening}The", return_tensors="pt"){note}',
        score_rows=[[*names, *(cells.get(label, "–") for label in facts.results)] for names, cells in rows.items()],
        in_chat=any("†" in cell for cells in rows.values() for cell in cells.values()),
        sources=[[number(source.get(key, "")) for key in keys] for source in facts.sources],
        training=[[label, number(value)] for label, value in facts.training.items()],
        version=__version__,
        number=number,
        table=table,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"
