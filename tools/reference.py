"""Write the pages of the documentation that are made from the code: settings, layers, verbs, recipes, packages.

python tools/reference.py [FOLDER]     default: docs/reference, which is not kept
"""

import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

import affinage.model.layers  # noqa: F401  the kinds register themselves
from affinage.cli import app
from affinage.config.load import packaged_recipes
from affinage.config.recipe import TRAININGS, Recipe
from affinage.config.settings import Settings, classes_in
from affinage.config.training import TrainSettings
from affinage.config.yaml import as_yaml
from affinage.model.layer import LAYERS

ROOT = Path(__file__).parents[1]
EXITS = """\
Exit status: 0 done, 2 a mistake in what was given (one message says which), 75 stopped after saving (run it again to go
on), 130 interrupted, 1 a defect of affinage."""


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", ByteSize: "bytes", Any: "any value"}


class Section(NamedTuple):
    """The settings of one class, as they stand in one place of the recipe; its key is "" for the recipe itself."""

    key: str
    meaning: str
    rows: tuple[tuple[str, str, str, str], ...]
    """Key (`*` is a name of the user's, `[]` a place in a list), type in words, default as YAML, and meaning."""


def sections(model: type[Settings], key: str = "") -> Iterator[Section]:
    """Yield the class's own settings, then those of the classes inside it, depth first.

    What all trainings share stands once, in the section `training`.
    """
    inside: list[tuple[str, type[Settings]]] = []
    rows = []
    shared = TrainSettings.model_fields if issubclass(model, TrainSettings) and model is not TrainSettings else {}
    for name, field in model.model_fields.items():
        if name in shared:
            continue
        dotted = f"{key}.{name}" if key else name
        inner = [(dotted + place, child) for place, child in classes_in(field.annotation)]
        if name == TRAININGS[0]:
            rows.append(("training", "section", "left out", ""))
            inside.append(("training", TrainSettings))
        inside += inner
        signs = [
            f"{_BOUNDS[bound]} {getattr(m, bound):g}" for m in field.metadata for bound in _BOUNDS if hasattr(m, bound)
        ]
        kind = f"{_words(field.annotation)} {', '.join(signs)}".rstrip()
        rows.append((name, kind, _default(field, bool(inner)), " ".join((field.description or "").split())))
    yield Section(key, inspect.cleandoc(model.__doc__ or ""), tuple(rows))
    for dotted, child in inside:
        yield from sections(child, dotted)


def _words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    if origin is dict:
        return f"mapping of {_words(inner[0])} to {_words(inner[1])}"
    if origin is Literal:
        return " | ".join(str(word) for word in inner)
    if origin is Annotated:
        return _words(inner[0])
    if origin is not None:
        return " | ".join(dict.fromkeys(_words(member) for member in inner if member is not type(None)))
    if annotation in _WORDS:
        return _WORDS[annotation]
    return "section" if issubclass(annotation, Settings) else str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.is_required() or field.default_factory_takes_validated_data:
        return "" if field.is_required() else "follows from others"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, Settings):
        return "its own defaults"
    if value is None:
        return "left out" if is_section else "none"
    return as_yaml(value)


def settings_page() -> str:
    """Every setting of a recipe; those that pretraining and tuning share, once."""
    lines = [
        "# Settings",
        "",
        "Every key that a recipe can hold. `*` stands for a name of yours, `[]` for a place in a list.",
        "",
    ]
    seen: dict[tuple[str, ...], str] = {}
    for section in sections(Recipe):
        first = seen.setdefault((section.meaning, *(key for key, *_ in section.rows)), section.key)
        lines += [f"## {section.key or 'The recipe'}", "", section.meaning, ""]
        if first != section.key:
            lines += [f"The same settings as [`{first}`](#{_anchor(first)}).", ""]
            continue
        lines += _table(section)
    return "\n".join(lines)


def layers_page() -> str:
    """Every layer with its settings."""
    lines = [
        "# Layers",
        "",
        "What a node of a model's graph can be. [Your own](../layers.md) is a class in any file.",
        "",
    ]
    for name, kind in sorted(LAYERS.items()):
        own, *inside = sections(kind)
        lines += [f"## {name}", "", own.meaning, ""]
        if kind.takes:
            lines += [f"Reads: {', '.join(f'`{taken}`' for taken in kind.takes)}.", ""]
        if own.rows:
            lines += _table(own)
        for section in inside:
            lines += [f"### {name}: {section.key}", "", section.meaning, "", *_table(section)]
    return "\n".join(lines)


def verbs_page() -> str:
    """Every verb of the command line with its arguments and options."""
    lines = ["# The command line", "", _paragraph(app.info.help), "", EXITS, ""]
    for path, command in _commands(get_command(app), ()):
        lines += [f"## affinage {' '.join(path)}", "", _paragraph(command.help), ""]
        rows = []
        for parameter in command.params:
            words = getattr(parameter, "metavar", None) or ""
            name = words or str(parameter.name)
            if parameter.param_type_name == "option":
                name = f"{', '.join(parameter.opts)} {words}".rstrip()
            rows.append(f"| `{_cell(name)}` | {_cell(getattr(parameter, 'help', '') or '')} |")
        if rows:
            lines += ["| argument | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def recipes_page() -> str:
    """The gallery."""
    lines = ["# Recipes", "", "They come along: `affinage run NAME`, `affinage new MINE --like NAME`.", ""]
    for name, path in packaged_recipes().items():
        comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        lines += [f"## {name}", "", "```", *(line.removeprefix("#").removeprefix(" ") for line in comment), "```", ""]
    return "\n".join(lines)


def package_page(package: Path) -> str:
    """A package's public modules, from their docstrings."""
    modules = [module for module in sorted(package.rglob("*.py")) if module.name != "__init__.py"]
    names = (".".join(module.relative_to(ROOT / "src").with_suffix("").parts) for module in modules)
    return "\n".join([f"# affinage.{package.name}", "", *(f"::: {name}\n" for name in names)])


def _commands(command: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield path, command
        return
    for name, child in inside.items():
        yield from _commands(child, (*path, name))


def _table(section: Section) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in section.rows:
        shown = f"`{_cell(default)}`" if default else "must be given"
        lines.append(f"| `{key}` | {_cell(kind)} | {shown} | {_cell(meaning)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _paragraph(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("\b", "")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    pages = {"settings": settings_page, "kinds": layers_page, "verbs": verbs_page, "recipes": recipes_page}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(page() + "\n", encoding="utf-8")
    (folder / "api" / "api.md").write_text("# affinage.api\n\n::: affinage.api\n", encoding="utf-8")
    for package in sorted((ROOT / "src" / "affinage").iterdir()):
        if (package / "__init__.py").is_file():
            (folder / "api" / f"{package.name}.md").write_text(package_page(package), encoding="utf-8")


if __name__ == "__main__":
    main()
