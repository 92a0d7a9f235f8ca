"""Write the pages of the documentation that are made from the code: settings, layers, verbs, recipes, rooms.

python tools/reference.py [FOLDER]     default: docs/reference, which is not kept
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

import affinage.model.layers  # noqa: F401  the kinds register themselves
from affinage.cli.config import head
from affinage.cli.program import app
from affinage.cli.reference import Section, sections
from affinage.config.load import packaged_recipes
from affinage.config.recipe import Recipe
from affinage.model.layer import LAYERS

ROOT = Path(__file__).parents[1]
EXITS = """\
Exit status: 0 done, 2 a mistake in what was given (one message says which), 75 stopped after saving (run it again to go
on), 130 interrupted, 1 a defect of affinage."""


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
        same = tuple(setting.key.removeprefix(section.key) for setting in section.settings)
        first = seen.setdefault((section.meaning, *same), section.key)
        lines += [f"## {section.key or 'The recipe'}", "", section.meaning, ""]
        if first != section.key:
            lines += [f"The same settings as [`{first}`](#{_anchor(first)}).", ""]
            continue
        lines += _table(section)
    return "\n".join(lines)


def kinds_page() -> str:
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
        if own.settings:
            lines += _table(own)
        for section in inside:
            lines += [f"### {name}: {section.key}", "", section.meaning, "", *_table(section)]
    return "\n".join(lines)


def verbs_page() -> str:
    """Every verb of the command line with its arguments and options."""
    lines = ["# The command line", "", _paragraph(app.info.help), ""]
    lines += [EXITS, ""]
    for path, command in _commands(get_command(app), ()):
        lines += [f"## affinage {' '.join(path)}", "", _paragraph(command.help), ""]
        rows = []
        for parameter in command.params:
            if parameter.name in ("help", "install_completion", "show_completion"):
                continue
            words = getattr(parameter, "metavar", None) or ""
            option = parameter.param_type_name == "option"
            name = (
                ", ".join(parameter.opts) + (f" {words}" if words else "") if option else words or str(parameter.name)
            )
            rows.append(f"| `{_cell(name)}` | {_cell(getattr(parameter, 'help', '') or '')} |")
        if rows:
            lines += ["| argument | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def recipes_page() -> str:
    """The gallery."""
    lines = ["# Recipes", "", "They come along: `affinage run NAME`, `affinage new MINE --like NAME`.", ""]
    for name, path in packaged_recipes().items():
        lines += [f"## {name}", "", "```", head(path), "```", ""]
    return "\n".join(lines)


def room_page(package: Path) -> str:
    """A room's public modules, from their docstrings."""
    lines = [f"# affinage.{package.name}", ""]
    for module in sorted(package.rglob("*.py")):
        dotted = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
        if module.name != "__init__.py":
            lines += [f"::: {dotted}", ""]
    return "\n".join(lines)


def _commands(command: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield path, command
        return
    for name, child in inside.items():
        yield from _commands(child, (*path, name))


def _table(section: Section) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for setting in section.settings:
        key = setting.key.removeprefix(section.key).lstrip(".")
        default = f"`{_cell(setting.default)}`" if setting.default else "must be given"
        rows.append(f"| `{key}` | {_cell(setting.type)} | {default} | {_cell(setting.meaning)} |")
    return [*rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _paragraph(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("\b", "")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    pages = {"settings": settings_page, "kinds": kinds_page, "verbs": verbs_page, "recipes": recipes_page}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(page() + "\n", encoding="utf-8")
    (folder / "api" / "api.md").write_text("# affinage.api\n\n::: affinage.api\n", encoding="utf-8")
    for package in sorted((ROOT / "src" / "affinage").iterdir()):
        if (package / "__init__.py").is_file():
            (folder / "api" / f"{package.name}.md").write_text(room_page(package), encoding="utf-8")


if __name__ == "__main__":
    main()
