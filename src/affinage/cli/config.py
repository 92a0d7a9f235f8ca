"""Verbs about recipes themselves: `recipes`, `new`, `config show`, `config schema`."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli import options
from affinage.cli.options import arg, load, opt, verb, verbs
from affinage.cli.output import Table, emit
from affinage.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from affinage.cli.reference import Value

group = verbs("config", "Show the settings of a recipe, or the JSON schema of recipes.")
_SCHEMA_FILE = "recipe.schema.json"
FACTS = ("Run", "Hardware", "Time", "Cost", "Expect")
_FACT = re.compile(rf"({'|'.join(FACTS)}): +(.*)")
_NEW = """\
# yaml-language-server: $schema={schema}
#
#   affinage run {file} --dry-run     what would run
#   affinage run {file}               run it
#   affinage config show {file}       every value in effect, and where it comes from
base: {base}
name: {name}

# What differs from the base comes here, for example:
#
# description: What it is, in a sentence: for its report and model card.
# data:
#   sources: [my_text/]            # a folder, files, or a dataset of the Hub
#   languages: [en, fr]
# pretrain: {{steps: 2000}}
"""


@verb()
def recipes(as_json: options.JsonOption = False) -> None:
    """List the packaged recipes.

    Example: affinage recipes
    """
    from affinage.config.load import packaged_recipes, read_file

    found: list[dict[str, Any]] = []
    rows = []
    for name, path in packaged_recipes().items():
        about = facts(path)
        texts = {fact.lower(): " ".join(lines) for fact, lines in about.items()} | {"run": about.get("Run", [])}
        description = read_file(path).value.get("description", "")
        found.append({"name": name, "description": description, **texts, "head": head(path)})
        shorts = (re.split("[:;]", found[-1][fact])[0] for fact in ("hardware", "time", "cost"))
        rows.append((name, f"{description}\n{', '.join(short for short in shorts if short != 'none')}"))
    more = "\nRun one: affinage run NAME. Start your own from one: affinage new my-run --like NAME."
    emit(found, as_json, [Table(("", ""), rows, left=(0, 1)), more])


def head(path: Path) -> str:
    """The comment at the top of a recipe file: what it does, its commands, what to expect."""
    comment = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))
    return re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.MULTILINE).rstrip("\n")


def facts(path: Path) -> dict[str, list[str]]:
    """The facts in the head of a recipe by name, as lines.

    A fact is a line `Name: text` and the indented lines after it; those of `Run` are one command each.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in head(path).splitlines():
        if match := _FACT.fullmatch(line):
            current = found.setdefault(match[1], [])
            current.append(match[2])
        elif line.startswith("  "):
            current.append(line.strip())
        else:
            current = []
    return found


@verb()
def new(
    name: Annotated[str, arg("NAME", "Of the run, and of the file NAME.yaml.")],
    like: Annotated[
        str, opt("The recipe to start from.", "--like", metavar="RECIPE", autocompletion=options.complete_recipe)
    ] = "quickstart",
) -> None:
    """Write NAME.yaml, a recipe based on another one, and the schema with which editors check it.

    Example: affinage new my-run --like novels
    """
    from affinage.config.load import find_recipe, packaged_recipes

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"a run cannot be called `{name}`", fix="Use letters, digits, dots and dashes.")
    path = Path(f"{name}.yaml")
    if path.exists():
        raise UserError("this file is there already", where=str(path), fix="Take another name, or remove it first.")
    base = find_recipe(like)
    shown = like if like in packaged_recipes() else base.as_posix()
    if not Path(_SCHEMA_FILE).exists():
        Path(_SCHEMA_FILE).write_text(_schema_text(), encoding="utf-8")
    path.write_text(_NEW.format(schema=_SCHEMA_FILE, file=path, base=shown, name=name), encoding="utf-8")
    print(f"Written: {path}, based on `{shown}`. Change it, then: affinage run {path}")


@verb(within=group)
def show(
    recipe: options.RecipeArgument,
    key: Annotated[str | None, arg("[KEY]", "Only this section or setting, and what it means.")] = None,
    overrides: options.SetOption = None,
    runs: options.RunsOption = options.RUNS,
    changes: Annotated[bool, opt("Only what differs from the recipe's base.", "--changes")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Print every value in effect, where it was written, and what it was in the recipe's base.

    The output is a recipe, too, without a base.

    Example: affinage config show novels-chat pretrain
    """
    from affinage.cli.reference import as_text, effective

    values = effective(load(recipe, overrides, runs, lenient=True))
    if key is not None:
        values = _under(values, key)
    if changes:
        values = [value for value in values if value.differs]
    rows = [
        {"key": value.key, "value": value.value, "origin": value.origin, "meaning": value.meaning}
        | ({"base": value.base} if value.differs else {})
        for value in values
    ]
    emit(rows, as_json, [as_text(values, meanings=key is not None).removesuffix("\n")] if values else [])


def _under(values: "list[Value]", key: str) -> "list[Value]":
    found = [value for value in values if value.key == key or value.key.startswith(f"{key}.")]
    if found:
        return found
    # It may be one that is left out: then only what it means can be printed.
    from affinage.cli.reference import settings_by_key

    plain, settings = re.sub(r"\.\d+(?=\.|$)", "[]", key), settings_by_key()
    if plain in settings:
        setting = settings[plain]
        print(f"{key} is not set. {setting.type}; default: {setting.default or 'must be given'}. {setting.meaning}")
        return []
    fix = did_you_mean(key, [*settings, *(value.key for value in values)])
    raise UserError(f"`{key}` is not a setting", where="KEY", fix=fix or "`affinage config show RECIPE` lists them.")


@verb(within=group)
def schema() -> None:
    """Print the JSON schema of recipes, for editors.

    Example: affinage config schema > recipe.schema.json
    """
    sys.stdout.write(_schema_text())


def _schema_text() -> str:
    import affinage.model.layers  # noqa: F401  the kinds register themselves
    from affinage.cli.reference import json_schema
    from affinage.model.layer import LAYERS

    written: dict[str, Any] = json_schema(LAYERS)
    return json.dumps(written, indent=1, ensure_ascii=False) + "\n"
