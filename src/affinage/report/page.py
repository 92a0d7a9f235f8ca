"""The HTML page: facts, words and charts put into templates. One file, nothing loaded from anywhere."""

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from babel import Locale
from babel.dates import format_datetime
from markupsafe import Markup

import affinage
from affinage.errors import UserError
from affinage.report import sections, summary
from affinage.report.facts import Facts, collect_facts
from affinage.report.figures import Artist
from affinage.report.published import beside_published
from affinage.report.quantities import ABSENT, Quantities
from affinage.report.reasons import detail_in, ending_in, reason_name
from affinage.report.strings import spoken, strings
from affinage.report.trainings import Training
from affinage.results import DocumentsResult

_TOLD = 0.05  # seconds that went to no step, below which they are not worth a line
# Control characters have no place in HTML, and lone surrogates none in UTF-8: a reader should see that one was there.
_UNSEEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")


def write_report(run_folder: Path, out: Path, language: str | None = None) -> dict[str, Any]:
    """Writes the report of a run as one self-contained HTML file.

    Args:
        run_folder: `runs/<name>`, with a folder per stage; stages that are not there have no section.
        out: the file to write; it appears whole or not at all.
        language: "en" or "fr"; None for the one that the recipe asks for.

    Returns:
        bytes of the file, its language, what the run made in one line, and the sections of the page.

    Raises:
        UserError: the file cannot be written.
    """
    facts = collect_facts(run_folder)
    language = spoken(language or facts.language)
    written = write_page(render(facts, language), out)
    told = summary.verdict(facts, language)
    return {"bytes": written, "language": language, "summary": told, "sections": sections.present(facts)}


def write_page(page: str, out: Path) -> int:
    """Writes a page, whole or not at all. Returns its bytes."""
    content = page.encode(errors="replace")
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        fix = "Make room or name another place, then write it again: nothing else is lost."
        raise UserError(f"cannot be written: {error.strerror}", where=str(out), fix=fix) from error
    return len(content)


def render(facts: Facts, language: str | None = None) -> str:
    """The page as HTML, in `language`, or in the one that the recipe asks for."""
    language = spoken(language or facts.language)
    words, quantities = strings(language), Quantities(language)
    artist = Artist(words, quantities)
    names = {"base": words["base"], "sft": words["sft_model"], "dpo": words["dpo_model"]}
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            **shell(language),
            facts=facts,
            artist=artist,
            description=facts.settings.description,
            verdict=summary.verdict(facts, language),
            headlines=summary.headlines(facts, words, quantities, names),
            sections=sections.present(facts),
            funnel=sections.funnel(facts.flows),
            thresholds=sections.thresholds(facts),
            contamination=facts.decontaminated,
            ngram=sections.setting_of(facts, "decontaminate", "data", "decontaminate", "n_grams"),
            compositions=_compositions(facts, words, language),
            pairs=sections.pairs(facts.near_duplicates),
            epochs=sections.epochs(facts),
            graph=sections.graph(facts),
            published=beside_published(facts, artist),
            score_rows=sections.score_rows(facts.evaluations, words, quantities),
            by_hand_rows=partial(sections.score_rows, words=words, quantities=quantities),
            samples=sections.samples(facts),
            comparisons=_comparisons(facts, words, quantities),
            losses=_losses(facts, words, quantities),
            strip=sections.strip(facts),
            time_by_group=sections.time_by_group,
            groups=sections.GROUPS,
            recipe_text=yaml.safe_dump(dict(facts.recipe), allow_unicode=True, sort_keys=False) if facts.recipe else "",
            date=partial(_date, language=language),
            reason=partial(reason_name, language=language),
            detail=partial(detail_in, language=language),
            ending=partial(ending_in, language=language),
            language_name=partial(_language_name, language=language, unknown=words["unknown"]),
            time_parts=lambda training: _time_parts(training, words, quantities),
        )
    )


def shell(language: str) -> dict[str, Any]:
    """What every page is given, of whatever it is: words and numbers of its language, style, script."""
    script = _packaged("hover.js")
    return {
        "t": strings(language),
        "q": Quantities(language),
        "language": language,
        "affinage_version": affinage.__version__,
        "style": Markup(_packaged("style.css")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def environment() -> jinja2.Environment:
    """The templates, with what they do to values."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("affinage.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["breakable"] = _breakable
    return made


def _visible(value: Any) -> Any:
    """What the page shows for a value: a dash for none, a replacement for characters that cannot be shown."""
    if value is None:
        return ABSENT
    return value.translate(_UNSEEN) if isinstance(value, str) else value


def _breakable(name: str) -> Markup:
    """A technical name that may be broken after its separators where there is little room."""
    return Markup("<wbr>").join(re.findall(r"[^_./-]*[_./-]+|[^_./-]+", name))


def _packaged(name: str) -> str:
    return (resources.files("affinage.report") / name).read_text(encoding="utf-8")


def _date(moment: datetime, language: str) -> str:
    return format_datetime(moment.astimezone(UTC), "d MMMM y, HH:mm", locale=language)


def _language_name(code: str, language: str, unknown: str) -> str:
    name = Locale(language).languages.get(code)
    return f"{name} ({code})" if name else code or unknown


def _compositions(facts: Facts, words: dict[str, str], language: str) -> list[tuple[str, str, list[Any]]]:
    """Tables of languages and sources of the last data stage that knows them."""
    found: list[tuple[str, str, list[Any]]] = []
    flows, nothing = [*facts.flows.values()][::-1], DocumentsResult()
    languages = next((flow for flow in flows if flow.by_language), nothing).by_language
    if shares := sections.shares_of(languages):
        named = [(_language_name(name, language, words["unknown"]), size, part) for name, size, part in shares]
        found.append((words["languages"], words["language"], named))
    if shares := sections.shares_of(next((flow for flow in flows if flow.by_source), nothing).by_source):
        found.append((words["sources"], words["source"], shares))
    return found


def _losses(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[dict[str, str]]:
    """What time went to that was no step, of which the prediction knows nothing."""
    rows = []
    for training in facts.trainings:
        for account in ("compile", "data", "validation", "save", "restore", "lost", "idle"):
            spent = training.seconds.get(account)
            if training.worked and spent and spent >= _TOLD:
                rows.append(
                    {
                        "stage": words[training.name],
                        "part": words[f"time_{account}"].format(time="").strip(),
                        "seconds": quantities.duration(spent),
                        "share": quantities.percent(spent / training.worked),
                    }
                )
    return rows


def _time_parts(training: Training, words: dict[str, str], quantities: Quantities) -> str:
    accounts = ("compute", "compile", "data", "validation", "save", "restore", "lost", "paused", "idle")
    spent = [(account, training.seconds.get(account, 0.0)) for account in accounts]
    return ", ".join(words[f"time_{account}"].format(time=quantities.duration(s)) for account, s in spent if s >= _TOLD)


def _comparisons(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[dict[str, str]]:
    """Predicted beside measured, each in its unit."""
    units: dict[str, Callable[[float | None], str]] = {
        "parameters": quantities.count,
        "tokens": quantities.count,
        "steps": quantities.count,
        "flops_per_step": quantities.flops,
        "flops": quantities.flops,
        "flops_per_second": partial(quantities.flops, unit="FLOP/s"),
        "tokens_per_second": quantities.count,
        "seconds": quantities.duration,
        "step_seconds": quantities.moment,
        "memory": quantities.bytes,
        "mfu": quantities.percent,
    }
    rows = []
    for training in facts.trainings:
        for one in training.compared:
            write = units.get(one.quantity, quantities.number)
            ratio = one.measured / one.predicted if one.measured is not None and one.predicted else None
            rows.append(
                {
                    "stage": words[training.name],
                    "quantity": words.get(f"q_{one.quantity}", one.quantity.replace("_", " ")),
                    "predicted": write(one.predicted),
                    "measured": write(one.measured),
                    "ratio": quantities.decimal(ratio),
                }
            )
    return rows
