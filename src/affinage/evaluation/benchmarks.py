"""The named benchmarks: lm-evaluation-harness's definitions, and files of their items on this machine.

benchmarks.yaml lists them and their groups. A definition is always the harness's. Its items come from the Hub, or from
a folder of JSON Lines in which a row is as in the Hub's dataset, or in one of the other common forms below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.errors import UserError
from affinage.paths import from_home

Item = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A task of the harness: its definition file there, other names of its file of items, a common form of its rows."""

    task: str
    definition: str
    files: tuple[str, ...] = ()
    form: str = ""

    def as_published(self, row: Item) -> Item:
        """Return a row of such a file as a row of the Hub's dataset."""
        key, convert = _FORMS.get(self.form, ("", dict))
        return dict(row) if key in row else convert(row)

    def file_in(self, folder: Path) -> Path | None:
        """Return the file of its items in a folder; None if there is none."""
        names = [name + ending for name in (self.task, *self.files) for ending in (".jsonl", ".jsonl.gz")]
        return next((folder / name for name in names if (folder / name).is_file()), None)


def _preprocessed(item: Item) -> Item:
    """From the output of the harness's preprocessing: `query`, `choices`, `gold`."""
    return item | {"label": str(item["gold"])}


def _belebele(item: Item) -> Item:
    """From passage and question in one text, and the choices {"A": ..., "D": ...} with the letter of the answer."""
    passage, _, question = item["question"].rpartition("\n\nQuestion: ")
    answers = {f"mc_answer{number}": item["choices"][letter] for number, letter in enumerate("ABCD", 1)}
    right = str("ABCD".index(item["answer"]) + 1)
    passage = passage.partition("Passage: ")[2]
    return {"flores_passage": passage, "question": question, **answers, "correct_answer_num": right}


def _winograd_schema(item: Item) -> Item:
    """From the pronoun's place among the tokens; the harness wants the sentence with `_` for it, and two options."""
    sentence, (pronoun, (first, _), _) = item["sentence"], item["pronoun"]
    place = 0
    for token in item["tokens"][:first]:
        place = max(place, sentence.find(token, place))  # some tokens are spelled otherwise in the sentence
    place = sentence.index(pronoun, place)
    (option1, _, _, right), (option2, _, _, _) = item["options"]
    blanked = sentence[:place] + "_" + sentence[place + len(pronoun) :]
    return {"sentence": blanked, "option1": option1, "option2": option2, "answer": "1" if right else "2"}


def _minimal_pair(item: Item) -> Item:
    return {"sen": item["sentence_good"], "wrong_sen": item["sentence_bad"]}


# Form: (a key that only rows of the Hub's dataset have, the conversion of other rows).
_FORMS: dict[str, tuple[str, Callable[[Item], Item]]] = {
    "preprocessed": ("endings", _preprocessed),
    "belebele": ("flores_passage", _belebele),
    "winograd_schema": ("option1", _winograd_schema),
    "minimal_pair": ("sen", _minimal_pair),
}
_LISTED = yaml.safe_load(files("affinage.evaluation").joinpath("benchmarks.yaml").read_text(encoding="utf-8"))
BENCHMARKS = {
    name: Benchmark(name, settings["definition"], tuple(settings.get("files", ())), settings.get("form", ""))
    for name, settings in _LISTED["benchmarks"].items()
}
QUICKSTART = "quickstart"  # another name for the pocket world's own benchmarks
POCKET_TASKS = tuple(
    f"pocket_{about}_{language}"
    for about in ("facts", "facts_unseen", "cross", "agreement", "arithmetic", "chat")
    for language in ("en", "fr")
)
GROUPS: dict[str, tuple[str, ...]] = {name: tuple(members) for name, members in _LISTED["groups"].items()}
GROUPS[QUICKSTART] = (POCKET_WORLD,)
CORE = "core"
CORE_SHOTS: dict[str, int] = _LISTED["groups"][CORE]


def of_pocket_world(task: str) -> bool:
    """Return whether it is one of the pocket world's benchmarks, or a name for all of them."""
    return task in (POCKET_WORLD, QUICKSTART, *POCKET_TASKS)


def is_task_file(task: str) -> bool:
    """Return whether a benchmark is named by its task file, or by a folder of them."""
    return not of_pocket_world(task) and ("/" in task or task.endswith((".yaml", ".yml")))


def files_of(tasks: Sequence[str], data_dir: str | Path) -> list[Path]:
    """Return the files of a folder that these benchmarks and groups read, each once."""
    members = [member for task in tasks for member in GROUPS.get(task, (task,)) if member in BENCHMARKS]
    return list(dict.fromkeys(file for name in members if (file := BENCHMARKS[name].file_in(from_home(data_dir)))))


def names_of(tasks: Sequence[str], data_dir: Path | None) -> tuple[list[str], list[str]]:
    """Return the members of all groups, and with a `data_dir` those that it has no file of.

    Raises UserError for a benchmark that is named by itself and has no file there, and for a group that has none.
    """
    chosen: dict[str, None] = {}
    unavailable: list[str] = []
    for task in tasks:
        members = GROUPS.get(task, (task,))
        absent = [m for m in members if data_dir and m in BENCHMARKS and BENCHMARKS[m].file_in(data_dir) is None]
        if absent and len(absent) == len(members):
            fix = f"Looked for {', '.join(f'{name}.jsonl' for name in absent)} (or .jsonl.gz)."
            raise UserError(f"there are no items of `{task}` in {data_dir}", fix=fix)
        chosen |= dict.fromkeys(member for member in members if member not in absent)
        unavailable += absent
    return list(chosen), unavailable
