"""The model card: what a released folder says about itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from affinage import __version__

_WORDS: dict[str, dict[str, str]] = {
    "en": {
        "model": "A language model of {parameters} parameters that reads {context} tokens at once.",
        "chat": "It was fine-tuned to answer in conversations.",
        "use": "Use",
        "scores": "Scores",
        "task": "Task",
        "metric": "Metric",
        "scores_note": "By lm-evaluation-harness; ± is one standard error.",
        "opening_note": "Its `hf` backend gives them with `--model_args pretrained=…,add_bos_token=True`: in training, "
        "every text began with `{opening}`.",
        "in_chat_note": "† asked in the chat template: not comparable with scores asked without it.",
        "text": "Training text",
        "source": "Source",
        "licence": "Licence",
        "documents": "Documents",
        "bytes": "Bytes",
        "training": "Training",
        "limits": "Limits",
        "limits_text": "It repeats what its training text says, true or not, and it has not been tested for safety.",
        "again": "Again",
        "made": "Weights under {licence}. Made with affinage {version}.",
    },
    "fr": {
        "model": "Un modèle de langue de {parameters} paramètres qui lit {context} tokens à la fois.",
        "chat": "Il a été affiné pour répondre dans des conversations.",
        "use": "Utilisation",
        "scores": "Scores",
        "task": "Épreuve",
        "metric": "Mesure",
        "scores_note": "Par lm-evaluation-harness\u00a0; ± est une erreur type.",
        "opening_note": "Son moteur `hf` les donne avec `--model_args pretrained=…,add_bos_token=True`\u00a0: à "
        "l’entraînement, chaque texte commençait par `{opening}`.",
        "in_chat_note": "† posé dans le modèle de conversation\u00a0: pas comparable aux scores posés sans lui.",
        "text": "Texte d’entraînement",
        "source": "Source",
        "licence": "Licence",
        "documents": "Documents",
        "bytes": "Octets",
        "training": "Entraînement",
        "limits": "Limites",
        "limits_text": "Il répète ce que dit son texte d’entraînement, vrai ou faux. Sa sûreté n’a pas été éprouvée.",
        "again": "Refaire",
        "made": "Poids sous {licence}. Fait avec affinage {version}.",
    },
}


@dataclass(frozen=True)
class CardFacts:
    """What the card is told by whoever ran the recipe. Everything left out is left out of the card."""

    licence: str  # SPDX identifier of the weights
    language: str = "en"  # that the card is written in: en or fr
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

    `opening`: what a text begins with that the tokenizer does not put before it by itself.
    """
    words = _WORDS[facts.language]
    what = words["model"].format(parameters=_shown(parameters, facts), context=_shown(context, facts))
    sources = (
        [str(source.get("name", "")), str(source.get("licence", ""))]
        + [_shown(source.get(key, ""), facts) for key in ("documents", "bytes")]
        for source in facts.sources
    )
    training = ((label, _shown(value, facts)) for label, value in facts.training.items())
    heads = [words[key] for key in ("source", "licence", "documents", "bytes")]
    sections = [
        f"---\n{_metadata(name, facts, chat).to_yaml()}\n---\n",
        f"# {name}\n",
        facts.description + "\n" if facts.description else "",
        facts.summary + "\n" if facts.summary else "",
        what + (f" {words['chat']}" if chat else "") + "\n",
        f"## {words['use']}\n\n" + _example(name, chat, opening) + "\n",
        _scores(facts, words, opening),
        _table(words["text"], heads, sources),
        _table(words["training"], ("", ""), training),
        f"## {words['limits']}\n\n{words['limits_text']}\n",
        f"## {words['again']}\n\n```\n{facts.command}\n```\n" if facts.command else "",
        words["made"].format(licence=facts.licence, version=__version__) + "\n",
    ]
    return "\n".join(section for section in sections if section)


_BASE_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("{opening}The", return_tensors="pt"){note}
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


def _example(name: str, chat: bool, opening: str) -> str:
    if chat:
        return _CHAT_EXAMPLE.format(name=name)
    note = f"  # in training, every text begins with {opening}" if opening else ""
    return _BASE_EXAMPLE.format(name=name, opening=opening, note=note)


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


def _scores(facts: CardFacts, words: Mapping[str, str], opening: str) -> str:
    """All scores with standard errors, one column for each label of the results."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, result in facts.results.items():
        for task, measured in result["tasks"].items():
            for metric, score in measured["metrics"].items():
                if score["value"] is not None:
                    error = "" if score["stderr"] is None else f" ± {_shown(score['stderr'], facts)}"
                    mark = " †" if score.get("in_chat") else ""
                    rows.setdefault((task, metric), {})[label] = _shown(score["value"], facts) + error + mark
    lines = (
        [task, metric, *(cells.get(label, "–") for label in facts.results)] for (task, metric), cells in rows.items()
    )
    table = _table(words["scores"], (words["task"], words["metric"], *facts.results), lines)
    in_chat = any("†" in cell for cells in rows.values() for cell in cells.values())
    notes = [words["scores_note"]]
    if opening:
        notes.append(words["opening_note"].format(opening=opening))
    if in_chat:
        notes.append(words["in_chat_note"])
    return table and f"{table}\n{' '.join(notes)}\n"


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"## {title}", "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *lines]) + "\n"


def _shown(value: Any, facts: CardFacts) -> str:
    """A number as readers of the card's language write it; other things as they are."""
    if not isinstance(value, int | float):
        return str(value)
    written = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    return written if facts.language == "en" else written.replace(",", "\u202f").replace(".", ",")
