"""The model card: what a released folder says about itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from affinage import __version__


@dataclass(frozen=True)
class CardFacts:
    """What the card is told by whoever ran the recipe. Everything left out is left out of the card."""

    licence: str  # SPDX identifier of the weights
    description: str = ""
    command: str = ""  # that makes this model again
    languages: Sequence[str] = ()  # ISO 639-1
    sources: Sequence[Mapping[str, Any]] = ()  # of the training text: name, licence, documents, bytes
    training: Mapping[str, Any] = field(default_factory=dict)  # label -> value, e.g. {"Tokens": 1_000_000}
    results: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # label ("base", "sft") -> evaluation results


def model_card(name: str, facts: CardFacts, *, parameters: int, context: int, chat: bool) -> str:
    """README.md of a released model, with metadata for the Hugging Face Hub; the scores in it are the last results."""
    sections = [
        f"---\n{_metadata(name, facts, chat).to_yaml()}\n---\n",
        f"# {name}\n",
        facts.description + "\n" if facts.description else "",
        f"A language model of {parameters:,} parameters that reads {context:,} tokens at once"
        + (", fine-tuned to answer in ChatML." if chat else ".")
        + "\n",
        "## Use\n\n" + (_CHAT_EXAMPLE if chat else _BASE_EXAMPLE).format(name=name) + "\n",
        _scores(facts.results),
        _table("## Training text", ("Source", "Licence", "Documents", "Bytes"), map(_source, facts.sources)),
        _table("## Training", ("", ""), ((label, _shown(value)) for label, value in facts.training.items())),
        "## Limits\n\nIt repeats what its training text says, true or not, and it has not been tested for safety.\n",
        f"## Again\n\n```\n{facts.command}\n```\n" if facts.command else "",
        f"Weights under {facts.licence}. Made with affinage {__version__}.\n",
    ]
    return "\n".join(section for section in sections if section)


_BASE_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("<s>The", return_tensors="pt")  # in training, every text begins with <s>
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""

_CHAT_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""


def _metadata(name: str, facts: CardFacts, chat: bool) -> ModelCardData:
    own = list(facts.results.values())[-1]["tasks"] if facts.results else {}
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            metric_type=metric,
            metric_value=round(score["value"], 4),
        )
        for task, result in own.items()
        for metric, score in result["metrics"].items()
        if score["value"] is not None
    ]
    return ModelCardData(
        license=facts.licence,
        language=list(facts.languages) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["affinage", "jax"] + (["conversational"] if chat else []),
        model_name=name if scores else None,
        eval_results=scores or None,
    )


def _scores(results: Mapping[str, Mapping[str, Any]]) -> str:
    """All scores with standard errors, one column for each label of `results`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, result in results.items():
        for task, measured in result["tasks"].items():
            for metric, score in measured["metrics"].items():
                if score["value"] is not None:
                    error = "" if score["stderr"] is None else f" ± {score['stderr']:.3f}"
                    rows.setdefault((task, metric), {})[label] = f"{score['value']:.3f}{error}"
    lines = ([task, metric, *(cells.get(label, "–") for label in results)] for (task, metric), cells in rows.items())
    table = _table("## Scores", ("Task", "Metric", *results), lines)
    return table and table + "\nBy lm-evaluation-harness; ± is one standard error.\n"


def _source(source: Mapping[str, Any]) -> list[str]:
    return [_shown(source.get(key, "")) for key in ("name", "licence", "documents", "bytes")]


def _table(title: str, header: Sequence[str], rows: Any) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join([title, "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *lines]) + "\n"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
