"""The facts of a run for its model card: those of the report, in fewer words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from affinage.config.data import SourceSettings
from affinage.data.places import unique
from affinage.hub.card import CardFacts
from affinage.report.facts import Facts, by_size
from affinage.report.figures import TITLES
from affinage.report.language import language_of
from affinage.report.page import summary
from affinage.results import DocumentsResult, Size

_CODE = re.compile("[a-z]{2,3}")  # of a language; source code and languages that are only guessed are written otherwise
_LEAST = 0.01  # share of the bytes: less of a language may be mistakes of language id


def card_facts(facts: Facts, license: str | None) -> CardFacts:
    """What a run adds to the card of its last model, in the language of the report.

    It holds no times: the same model has the same card.
    """
    t, data = language_of(facts.settings.report.get("language")), facts.settings.data
    documents = list(facts.documents.values())
    licenses = _licenses(data.get("sources") or [])
    training = {}
    for one in facts.trainings:
        for what, count in ((t("steps"), one.result.steps), (t("tokens"), one.result.tokens)):
            if count is not None:
                training[t("{step}: {what}", step=t(TITLES[one.name]), what=what)] = count
    return CardFacts(
        license=license,
        tuned=any(one.name in ("sft", "dpo") for one in facts.trainings),
        language=t.code,
        summary=summary(facts, t.code, timed=False) if facts.trainings else "",
        description=facts.settings.description,
        command=facts.command,
        languages=_languages(documents) or tuple(data.get("languages") or ()),
        sources=[
            {"name": name, "licence": licenses.get(name, ""), "documents": size.documents, "bytes": size.bytes}
            for name, size in (by_size(documents[-1].by_source) if documents else ())
        ],
        training=training,
        results={one.model: one.to_dict() for one in facts.evaluations},
    )


def _languages(steps: Sequence[DocumentsResult]) -> tuple[str, ...]:
    """The languages that were found in the training text; none if no step identified them."""
    found: Mapping[str, Size] = next((step.by_language for step in reversed(steps) if step.by_language), {})
    least = _LEAST * sum(size.bytes or 0 for size in found.values())
    large = (name for name, size in found.items() if (size.bytes or 0) >= least)
    return tuple(sorted(name for name in large if _CODE.fullmatch(name) and name != "und"))


def _licenses(sources: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The license that a recipe states of each of its sources, by the names that documents have for them."""
    found: dict[str, str] = {}
    for one in sources:
        try:
            title = SourceSettings.model_validate(dict(one)).title
        except ValidationError:  # of another version
            title = str(one.get("name") or "")
        found[unique(title, found)] = str(one.get("license") or "")
    return found
