"""The facts of a run for its model card: those of the report, in fewer words."""

import re
from collections.abc import Mapping

from pydantic import ValidationError

from affinage.config.data import SourceSettings
from affinage.data.places import unique
from affinage.hub.folder import CardFacts
from affinage.report.facts import Facts, by_size
from affinage.report.figures import TITLES
from affinage.report.language import language_of
from affinage.report.page import summary
from affinage.results import Size

_CODE = re.compile("[a-z]{2,3}")  # of a language; source code and languages that are only guessed are written otherwise
_LEAST = 0.01  # share of the bytes: less of a language may be mistakes of language id


def card_facts(facts: Facts, license: str | None) -> CardFacts:
    """What a run adds to the card of its last model, in the language of the report.

    It holds no times: the same model has the same card.
    """
    t, data = language_of(facts.settings.report.get("language")), facts.settings.data
    documents = list(facts.documents.values())
    by_language: Mapping[str, Size] = next((step.by_language for step in reversed(documents) if step.by_language), {})
    least = _LEAST * sum(size.bytes or 0 for size in by_language.values())
    large = [name for name, size in by_language.items() if (size.bytes or 0) >= least]
    languages = tuple(sorted(name for name in large if _CODE.fullmatch(name) and name != "und"))
    licenses: dict[str, str] = {}  # that the recipe states, by the names that documents have for their sources
    for source in data.get("sources") or []:
        try:
            title = SourceSettings.model_validate(dict(source)).title
        except ValidationError:  # of another version
            title = str(source.get("name") or "")
        licenses[unique(title, licenses)] = str(source.get("license") or "")
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
        languages=languages or tuple(data.get("languages") or ()),
        sources=[
            {"name": name, "licence": licenses.get(name, ""), "documents": size.documents, "bytes": size.bytes}
            for name, size in (by_size(documents[-1].by_source) if documents else ())
        ],
        training=training,
        results={one.model: one.to_dict() for one in facts.evaluations},
    )
