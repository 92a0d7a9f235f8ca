"""The pages: facts, messages and charts put into templates, each one file that loads nothing; and facts of a card."""

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from pydantic import ValidationError

import affinage
from affinage.config.data import SourceSettings
from affinage.config.yaml import brief
from affinage.data.places import unique
from affinage.differing import differing
from affinage.errors import UserError
from affinage.evaluation.results import Difference, compare, read_answers
from affinage.hub.folder import CardFacts
from affinage.json_files import write_atomically
from affinage.report import figures
from affinage.report.facts import (
    MODELS,
    Evaluation,
    Facts,
    HeldOut,
    by_size,
    changes,
    collect_facts,
    held_out,
    held_out_apart,
    read_evaluation,
)
from affinage.report.figures import TITLES, Figure, Series, line_figure, loss_axis, score_figure, smoothed, thinned
from affinage.report.language import ABSENT, N_, Language, language_of
from affinage.results import Size, headline, is_share, read_json

_CODE = re.compile("[a-z]{2,3}")  # of a language; source code and languages that are only guessed are written otherwise
_LEAST = 0.01  # share of the bytes: less of a language may be mistakes of language id
# Control characters have no place in HTML, and lone surrogates none in UTF-8: a reader should see that one was there.
_UNSEEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")
_NAMES = ("name", "description", "report")  # settings that change nothing of what is compared


def write_report(run_folder: Path, out: Path, language: str | None = None) -> dict[str, Any]:
    """Write the report of a run, `runs/<name>` with a folder per step, as one HTML file, whole or not at all.

    `language` is "en" or "fr"; None for the one of the recipe. Returns the bytes of the file, its language, and what
    the run made in one line.
    """
    facts = collect_facts(run_folder)
    t = language_of(language or facts.settings.report.get("language"))
    written = write_page(render(facts, t.code), out)
    return {"bytes": written, "language": t.code, "summary": summary(facts, t.code)}


def write_page(page: str, out: Path) -> int:
    """Write a page, whole or not at all. Returns its bytes. Raises UserError for the path of a folder."""
    if out.is_dir():
        raise UserError("this is a folder", where=str(out), fix="Name a file, such as page.html.")
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


def card_facts(facts: Facts, license: str | None, *, at: Mapping[str, Any] | None = None) -> CardFacts:
    """What a run adds to the card of its last model, in the language of the report.

    It holds no times: the same model has the same card. A checkpoint is `at` {model, step, steps in all}.
    """
    t, data = language_of(facts.settings.report.get("language")), facts.settings.data
    documents = list(facts.documents.values())
    by_language: Mapping[str, Size] = next((step.by_language for step in reversed(documents) if step.by_language), {})
    least = _LEAST * sum(size.bytes or 0 for size in by_language.values())
    large = [name for name, size in by_language.items() if (size.bytes or 0) >= least]
    languages = tuple(sorted(name for name in large if _CODE.fullmatch(name) and name != "und"))
    licenses: dict[str, str] = {}  # that the recipe states, by the names that documents have for their sources
    for source in data.get("sources") or []:
        title = str(source.get("name") or "")
        with contextlib.suppress(ValidationError):  # of a source of another version
            title = SourceSettings.model_validate(dict(source)).title
        licenses[unique(title, licenses)] = str(source.get("license") or "")
    training = dict[str, Any]()
    for one in facts.trainings:
        for what, count in ((t("steps"), one.result.steps), (t("tokens"), one.result.tokens)):
            if count is not None:
                training[t("{step}: {what}", step=t(TITLES[one.name]), what=what)] = count
    if at is not None:
        counts = {name: t.count(at[name]) for name in ("step", "steps")}
        training[t("Checkpoint")] = t("{model}, step {step} of {steps}", model=at["model"], **counts)
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


# ---- several runs side by side ----


@dataclass(frozen=True)
class Entrant:
    """One of those that are compared."""

    name: str  # as the user called it
    facts: Facts  # of its run; empty for results without a run
    results: Path | None = None  # the folder of its answers to benchmarks
    last: bool = False  # whether it is its run's last training, not the whole run, whose first one has the loss

    @property
    def is_run(self) -> bool:
        """Whether more is known of it than its answers."""
        return bool(self.facts.recipe)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Its scores; without a folder of answers, those of its run's last model."""
        if self.results is not None:
            return read_evaluation(self.name, self.results)
        return next(reversed(self.facts.evaluations), None)

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """Of each validation set, after the run's first training, or the one that is compared."""
        sets = self.facts.trainings[-self.last].result.validation if self.facts.trainings else {}
        return {name: one.bits_per_byte for name, one in sets.items() if one.bits_per_byte is not None}

    @property
    def quantities(self) -> dict[str, Any]:
        """What a run took and gave, in numbers; what it does not know is left out."""
        results = [training.result for training in self.facts.trainings]
        if not results:
            return {}
        first, seconds = results[-self.last], sum(result.worked or 0.0 for result in results)
        known = {
            "parameters": first.parameters.total,
            "tokens": sum(result.tokens or 0 for result in results),
            "flops": sum((result.flops_per_step or 0.0) * (result.steps or 0) for result in results),
            "devices": str(first.devices),
            "training_seconds": seconds,
            "device_hours": seconds * (first.devices.count or 0) / 3600,
            "seconds": self.facts.seconds,
            "tokens_per_second": first.tokens_per_second,
            "mfu": first.mfu,
            "final_loss": first.final_loss,
        }
        return {name: value for name, value in known.items() if value}


@dataclass(frozen=True)
class Comparison:
    """Several entrants, their settings that differ (key -> the values), and by name the differences from the first."""

    entrants: list[Entrant]
    settings: dict[str, tuple[Any, ...]]
    paired: dict[str, list[Difference]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        pairs = [(name, difference) for name, differences in self.paired.items() for difference in differences]
        return {
            "runs": [
                {"name": one.name, "summary": summary(one.facts, "en") if one.is_run else "", **one.quantities}
                | {"bits_per_byte": one.bits_per_byte, "scores": one.evaluation.to_dict() if one.evaluation else {}}
                for one in self.entrants
            ],
            "settings": [{"key": key, "values": list(values)} for key, values in self.settings.items()],
            "differences": [{"from": self.entrants[0].name, "to": name} | asdict(one) for name, one in pairs],
            "notes": sum((self.notes_of(name, Language("en")) for name in self.paired), self.notes(Language("en"))),
        }

    def notes(self, t: Language) -> list[str]:
        """What must be known of all entrants: the validation sets that are not of the same text."""
        trainings = [one.facts.trainings for one in self.entrants]
        of_name = ([one.held_out for of in trainings for one in of if one.name == name] for name in MODELS)
        return held_out_notes(of_name, t)

    def notes_of(self, name: str, t: Language) -> list[str]:
        """What must be known of an entrant's differences: which tasks were asked in another way, and in which."""
        compared = [one for one in self.entrants if one.name in (self.entrants[0].name, name)]
        asked = {one.name: one.evaluation.tasks for one in compared if one.evaluation}
        tasks = []
        for task, count in {one.task: one.asked_otherwise for one in self.paired[name] if one.asked_otherwise}.items():
            of_task = {of: results[task] for of, results in asked.items() if task in results}
            in_chat = ", ".join(of for of, result in of_task.items() if result.chat_template)
            shots = [str(result.num_fewshot) for result in of_task.values()]
            ways = [t("asked in the chat template: {names}", names=in_chat)] if in_chat else []
            ways += [t("examples before a question: {counts}", counts=", ".join(shots))] if len({*shots}) > 1 else []
            ways.append(t("items with another prompt or right answer: {count}", count=count))
            tasks.append(f"{task} ({'; '.join(ways)})")
        listed = ", ".join(tasks)
        return [t("Differences in these tasks are not of the models alone: {tasks}.", tasks=listed)] if tasks else []


def held_out_notes(compared: Iterable[Sequence[Mapping[str, HeldOut]]], t: Language) -> list[str]:
    """A line about validation sets that are not of the same text, of several trainings each compared between runs."""
    names = ", ".join(dict.fromkeys(name for of_training in compared for name in held_out_apart(of_training)))
    what = N_(
        "The runs measure different held-out text of {names}: losses and bits per byte do not compare the models."
    )
    return [t(what, names=names)] if names else []


def losses_notes(runs: Iterable[Path]) -> list[str]:
    """What must be known where the losses of the last training of several runs are side by side."""
    compared = []
    for run in runs:
        last = next((name for name in reversed(MODELS) if (run / name / "feed.json").is_file()), "")
        compared.append(held_out(last, run / last, read_json(run / "recipe.json")))
    return held_out_notes([compared], Language("en"))


def comparison(entrants: Sequence[Entrant]) -> Comparison:
    """Compare several entrants.

    Raises:
        UserError: nothing can be compared: they are no runs, and have no item of a benchmark in common.
    """
    settings = {}
    if all(one.is_run for one in entrants):
        settings = differing_settings([one.facts.recipe for one in entrants])
    first, paired = entrants[0], {}
    for other in entrants[1:]:
        if first.results is not None and other.results is not None:
            try:
                paired[other.name] = compare(read_answers(first.results), read_answers(other.results))
            except UserError:
                if not (first.is_run and other.is_run):  # then there is nothing else to compare
                    raise
    if not (settings or paired or any(one.quantities for one in entrants)):
        what = "there is nothing to compare: no training, no results, the same settings"
        fix = "Run their recipes, or evaluate each: affinage eval NAME --tasks TASK"
        raise UserError(what, where=", ".join(one.name for one in entrants), fix=fix)
    return Comparison(list(entrants), settings, paired)


def differing_settings(recipes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The settings that are not the same in all recipes, by their keys as `--set` takes them; sections as a whole."""
    return {key: values for key, values in differing(recipes) if key.split(".")[0] not in _NAMES}


def render_comparison(compared: Comparison, language: str | None = None) -> str:
    """The comparison as one self-contained HTML page, in English or French."""
    t = language_of(language)
    evaluations = {one.name: one.evaluation for one in compared.entrants if one.evaluation}
    return render_template(
        "comparison.html.j2",
        t,
        compared=compared,
        summaries={one.name: summary(one.facts, t.code) if one.is_run else "" for one in compared.entrants},
        brief=brief,
        losses=[figure for name in MODELS if (figure := _loss_figure(compared, name, t))],
        scores=score_figure(evaluations, t, t("Scores side by side")),
    )


def _loss_figure(compared: Comparison, name: str, t: Language) -> Figure | None:
    """The losses of one training in all runs that have it, against tokens."""
    series = []
    for place, one in enumerate(compared.entrants):
        training = one.facts.training(name)
        if training is None or not training.result.tokens or not training.result.steps:
            continue
        tokens = training.result.tokens / training.result.steps
        curve = [(step * tokens, loss) for step, loss in smoothed(training.curves.get("loss", []))]
        sets = [dict(points) for points in training.validation.values()]
        steps = sorted(set.intersection(*map(set, sets))) if sets else []
        means = [(step * tokens, sum(losses[step] for losses in sets) / len(sets)) for step in steps]
        series.append(Series(one.name, thinned(curve), place, "line"))
        series.append(Series(t("validation: {name}", name=one.name), thinned(means, 60), place, "points"))
    series = [one for one in series if one.points]
    if len({one.color for one in series}) < 2:
        return None
    title = t("Loss: {training}", training=t(TITLES[name]))
    return line_figure(title, series, t("training tokens"), loss_axis(series, name, t), t)
