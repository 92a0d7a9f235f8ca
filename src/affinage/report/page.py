"""The pages: facts, messages and charts put into templates. Each page is one file that loads nothing."""

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

import affinage
from affinage.data.json_files import write_atomically
from affinage.report import figures
from affinage.report.facts import Facts, by_size, changes, collect_facts
from affinage.report.language import ABSENT, Language, language_of
from affinage.results import headline, is_share

# Control characters have no place in HTML, and lone surrogates none in UTF-8: a reader should see that one was there.
_UNSEEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")


def write_report(run_folder: Path, out: Path, language: str | None = None) -> dict[str, Any]:
    """Write the report of a run as one self-contained HTML file, whole or not at all.

    Args:
        run_folder: `runs/<name>`, with a folder per step; steps that are not there have no section.
        out: the file.
        language: "en" or "fr"; None for the one of the recipe.

    Returns:
        bytes of the file, its language, and what the run made in one line.
    """
    facts = collect_facts(run_folder)
    t = language_of(language or facts.settings.report.get("language"))
    written = write_page(render(facts, t.code), out)
    return {"bytes": written, "language": t.code, "summary": summary(facts, t.code)}


def write_page(page: str, out: Path) -> int:
    """Write a page, whole or not at all. Returns its bytes."""
    content = page.encode(errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)
    return len(content)


def render(facts: Facts, language: str | None = None) -> str:
    """The page as HTML, in `language`, or in the one of the recipe."""
    t = language_of(language or facts.settings.report.get("language"))
    evaluations = facts.evaluations
    return render_template(
        "report.html.j2",
        t,
        facts=facts,
        by_size=by_size,
        summary=summary(facts, t.code),
        changes=changes(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else {},
        recipe_text=yaml.safe_dump(dict(facts.recipe), allow_unicode=True, sort_keys=False) if facts.recipe else "",
    )


def render_template(name: str, t: Language, **values: Any) -> str:
    """A page of the template of that name. Every page gets the language, the charts, the style and the script."""
    files = resources.files("affinage.report")
    script, style = ((files / file).read_text(encoding="utf-8") for file in ("hover.js", "style.css"))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("affinage.report"),
        autoescape=name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A technical name may be broken after its separators where there is little room.
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(re.findall(r"[^_./-]*[_./-]+|[^_./-]+", text))
    return environment.get_template(name).render(
        t=t,
        figures=figures,
        headline_of=headline,
        is_share=is_share,
        named=lambda evaluations: {figures.model_name(one, t): one for one in evaluations},
        affinage_version=affinage.__version__,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def _visible(value: Any) -> Any:
    """What the page shows for a value: a dash for none, a replacement for characters that cannot be shown."""
    if value is None:
        return ABSENT
    return value.translate(_UNSEEN) if isinstance(value, str) else value


def summary(facts: Facts, language: str, *, timed: bool = True) -> str:
    """What was made, of how much text, and how good it is, in one line of text; `timed`, also in what time on what."""
    return render_template("summary.txt.j2", language_of(language), facts=facts, timed=timed).strip()
