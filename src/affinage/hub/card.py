"""The model card: what a released folder says about itself, by huggingface_hub's template engine."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from affinage import __version__

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class CardFacts:
    """What a run knows about its model. A section without facts is left out of the card."""

    license: str  # SPDX identifier of the weights
    language: str = "en"  # of the card: en or fr
    summary: str = ""  # what the run made, in one line
    description: str = ""
    command: str = ""  # that makes this model again
    languages: Sequence[str] = ()  # ISO 639-1, of the text
    sources: Sequence[Mapping[str, Any]] = ()  # of the training text: name, licence, documents, bytes
    training: Mapping[str, Any] = field(default_factory=dict)  # label -> value, e.g. {"Tokens": 1_000_000}
    results: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # label ("base", "sft") -> {"tasks": {task: {"metrics": {metric: {"value", "stderr"}}}}}


def model_card(name: str, facts: CardFacts, *, parameters: int, context: int, chat: bool, opening: str = "<s>") -> str:
    """README.md of a released model, with metadata for the Hugging Face Hub; the scores in it are the last results.

    `opening` is what every training text began with, where the tokenizer does not add it by itself.
    """

    def number(value: Any) -> str:
        """A number as readers of the card's language write it; anything else as it is."""
        if not isinstance(value, int | float):
            return str(value)
        written = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        return written if facts.language == "en" else written.replace(",", "\u202f").replace(".", ",")

    scores = _scores(facts, number)
    card = ModelCard.from_template(
        _metadata(name, facts, chat),
        template_path=str(_TEMPLATES / f"card.{facts.language}.md"),
        name=name,
        description=facts.description,
        summary=facts.summary,
        parameters=parameters,
        context=context,
        chat=chat,
        opening=opening,
        example=_example(name, chat, opening),
        labels=list(facts.results),
        score_rows=scores,
        in_chat=any("†" in cell for row in scores for cell in row),
        sources=[
            [str(one.get("name", "")), str(one.get("licence", ""))]
            + [number(one.get(key, "")) for key in ("documents", "bytes")]
            for one in facts.sources
        ],
        training=[[label, number(value)] for label, value in facts.training.items()],
        command=facts.command,
        version=__version__,
        number=number,
        table=_table,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""
_CHAT_INPUTS = """\
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""


def _example(name: str, chat: bool, opening: str) -> str:
    if chat:
        return _EXAMPLE.format(name=name, inputs=_CHAT_INPUTS)
    note = f"  # in training, every text begins with {opening}" if opening else ""
    return _EXAMPLE.format(name=name, inputs=f'inputs = tokenizer("{opening}The", return_tensors="pt"){note}')


def _metadata(name: str, facts: CardFacts, chat: bool) -> ModelCardData:
    last = list(facts.results.values())[-1]["tasks"] if facts.results else {}
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            metric_type=metric,
            metric_value=round(score["value"], 4),
        )
        for task, result in last.items()
        for metric, score in result["metrics"].items()
        if score["value"] is not None
    ]
    return ModelCardData(
        license=facts.license,
        language=list(facts.languages) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["affinage", "jax"] + (["conversational"] if chat else []),
        model_name=name if scores else None,
        eval_results=scores or None,
    )


def _scores(facts: CardFacts, number: Any) -> list[list[str]]:
    """All scores with standard errors, one column for each label of the results."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, result in facts.results.items():
        for task, measured in result["tasks"].items():
            for metric, score in measured["metrics"].items():
                if score["value"] is not None:
                    error = "" if score["stderr"] is None else f" ± {number(score['stderr'])}"
                    mark = " †" if score.get("in_chat") else ""
                    rows.setdefault((task, metric), {})[label] = number(score["value"]) + error + mark
    return [[*names, *(cells.get(label, "–") for label in facts.results)] for names, cells in rows.items()]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *lines])
