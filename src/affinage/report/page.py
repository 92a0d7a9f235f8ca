"""The pages: facts, messages and charts put into templates. Each page is one file that loads nothing."""

import base64
import contextlib
import hashlib
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

import affinage
from affinage.errors import UserError
from affinage.report import figures
from affinage.report.baselines import Baselines, baseline_figures, read_baselines
from affinage.report.evaluations import changes, headline
from affinage.report.facts import TRAININGS, Facts, by_size, collect_facts
from affinage.report.language import ABSENT, N_, Language, language_of

# Control characters have no place in HTML, and lone surrogates none in UTF-8: a reader should see that one was there.
_UNSEEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")
TITLES = {  # of sections, and of steps that a page names
    "data": N_("Data"),
    "duplicates": N_("Near duplicates"),
    "tokenizer": N_("Tokenizer"),
    "sequences": N_("Sequences"),
    "model": N_("Model"),
    "pretrain": N_("Pretraining"),
    "sft": N_("Fine-tuning"),
    "dpo": N_("Preferences"),
    "compression": N_("Bits per byte"),
    "scores": N_("Scores"),
    "samples": N_("What it writes"),
    "predicted": N_("Predicted and measured"),
    "settings": N_("Settings"),
    "steps": N_("Steps"),
    "ingest": N_("ingest"),
    "filter": N_("filter"),
    "dedup": N_("dedup"),
    "decontaminate": N_("decontaminate"),
    "split": N_("split"),
    "runs": N_("At a glance"),
    "differing": N_("Settings that differ"),
    "losses": N_("Losses"),
    "judged": N_("Scores side by side"),
    "differences": N_("Item by item"),
}


def write_report(
    run_folder: Path, out: Path, language: str | None = None, baselines: Path | None = None
) -> dict[str, Any]:
    """Write the report of a run as one self-contained HTML file.

    Args:
        run_folder: `runs/<name>`, with a folder per step; steps that are not there have no section.
        out: the file to write; it appears whole or not at all.
        language: "en" or "fr"; None for the one of the recipe.
        baselines: a YAML file with published scores to show beside those of the run.

    Returns:
        bytes of the file, its language, what the run made in one line, and the sections of the page.

    Raises:
        UserError: the file cannot be written, or that of the baselines not read.
    """
    published = None if baselines is None else read_baselines(baselines)
    facts = collect_facts(run_folder)
    t = language_of(language or facts.settings.report.language)
    written = write_page(render(facts, t.code, published), out)
    return {"bytes": written, "language": t.code, "summary": summary(facts, t.code), "sections": sections(facts)}


def write_page(page: str, out: Path) -> int:
    """Write a page, whole or not at all. Returns its bytes."""
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


def render(facts: Facts, language: str | None = None, baselines: Baselines | None = None) -> str:
    """The page as HTML, in `language`, or in the one of the recipe."""
    t = language_of(language or facts.settings.report.language)
    evaluations = facts.evaluations
    return render_template(
        "report.html.j2",
        t,
        facts=facts,
        by_size=by_size,
        summary=summary(facts, t.code),
        sections=sections(facts),
        changes=changes(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else {},
        baselines=baselines,
        published=baseline_figures(facts, baselines, t) if baselines else [],
        recipe_text=yaml.safe_dump(dict(facts.recipe), allow_unicode=True, sort_keys=False) if facts.recipe else "",
    )


def render_template(name: str, t: Language, **values: Any) -> str:
    """A page of the template of that name. Every page gets the language, the charts, the style and the script."""
    script = _packaged("hover.js")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("affinage.report"),
        autoescape=name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(name).render(
        t=t,
        figures=figures,
        headline_of=headline,
        titles=TITLES,
        affinage_version=affinage.__version__,
        style=Markup(_packaged("style.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


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


def sections(facts: Facts) -> list[str]:
    """Names of the sections that have something to show, in the order of the page."""
    shown = {
        "data": facts.documents,
        "duplicates": facts.near_duplicates,
        "tokenizer": "train-tokenizer" in facts.results,
        "sequences": "tokenize" in facts.results,
        "model": facts.analysis,
        **{name: facts.training(name) for name in TRAININGS},
        "compression": any(evaluation.compression for evaluation in facts.evaluations),
        "scores": any(evaluation.scores for evaluation in (*facts.evaluations, *facts.by_hand)),
        "samples": any(facts.samples),
        "predicted": any(training.compared for training in facts.trainings),
        "settings": facts.recipe or facts.versions,
        "steps": facts.steps,
    }
    return [name for name, there in shown.items() if there]


def summary(facts: Facts, language: str, *, timed: bool = True) -> str:
    """What was made, of how much text, in what time, and how good it is, in one line of text.

    Args:
        facts: of the run.
        language: "en" or "fr"; English for others.
        timed: whether to state how long the trainings took and on what; a card that must not change does not.
    """
    return render_template("summary.txt.j2", language_of(language), facts=facts, timed=timed).strip()
