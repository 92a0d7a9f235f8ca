"""The benchmarks that have names here: lm-evaluation-harness's definitions, and files of their items on this machine.

benchmarks.yaml lists them and their groups. A definition is always the harness's. Its items come from the Hub, or from
a folder of JSON Lines in which a row is as in the Hub's dataset, or in one of the other common forms below.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.errors import UserError
from affinage.paths import from_home

Item = dict[str, Any]

_ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Benchmark:
    """A task of the harness. `definition` is its file there, `files` what a file of its items may be called."""

    task: str
    definition: str
    files: tuple[str, ...] = ()
    form: str = ""  # another common form of the rows of such a file

    def as_published(self, row: Item) -> Item:
        """A row of such a file as a row of the Hub's dataset."""
        return _FORMS[self.form](row) if self.form else dict(row)

    def file_in(self, folder: Path) -> Path | None:
        """The file of its items in a folder; None if there is none."""
        names = [name + ending for name in (self.task, *self.files) for ending in _ENDINGS]
        return next((folder / name for name in names if (folder / name).is_file()), None)


def _preprocessed(item: Item) -> Item:
    """Where the harness's preprocessing has been done: `query`, `choices`, `gold`."""
    return item if "endings" in item else item | {"label": str(item["gold"])}


def _belebele(item: Item) -> Item:
    """Where passage and question are one text, and the choices {"A": ..., "D": ...} with the letter of the answer."""
    if "flores_passage" in item:
        return item
    passage, _, question = item["question"].rpartition("\n\nQuestion: ")
    answers = {f"mc_answer{number}": item["choices"][letter] for number, letter in enumerate("ABCD", 1)}
    return {
        "flores_passage": passage.partition("Passage: ")[2],
        "question": question,
        **answers,
        "correct_answer_num": str("ABCD".index(item["answer"]) + 1),
    }


def _winograd_schema(item: Item) -> Item:
    """Where the pronoun is given by its place among the tokens: the sentence with `_` for it, and two options."""
    if "option1" in item:
        return item
    sentence, (pronoun, (first, _), _) = item["sentence"], item["pronoun"]
    at = 0
    for token in item["tokens"][:first]:
        found = sentence.find(token, at)
        at = found + len(token) if found >= 0 else at  # some tokens are spelled otherwise in the sentence
    at = sentence.index(pronoun, at)
    (option1, _, _, right), (option2, _, _, _) = item["options"]
    blanked = sentence[:at] + "_" + sentence[at + len(pronoun) :]
    return {"sentence": blanked, "option1": option1, "option2": option2, "answer": "1" if right else "2"}


def _minimal_pair(item: Item) -> Item:
    return item if "sen" in item else {"sen": item["sentence_good"], "wrong_sen": item["sentence_bad"]}


def _arc_in_translation(item: Item) -> Item:
    """Where the choices are {"text": [...], "label": [...]}, as in the English ARC."""
    if "instruction" in item:
        return item
    texts = dict(zip("abcde", [*item["choices"]["text"], None, None]))
    right = item["choices"]["label"].index(item["answerKey"])
    options = {f"option_{letter}": text for letter, text in texts.items()}
    return {"id": item.get("id", ""), "instruction": item["question"], **options, "answer": "ABCDE"[right]}


def _arc_with_letters(item: Item) -> Item:
    """Where the choices are {"text": [...], "label": [...]}, as in the English ARC."""
    if not isinstance(item["choices"], Mapping):
        return item
    right = item["choices"]["label"].index(item["answerKey"])
    return item | {"choices": item["choices"]["text"], "answerKey": "ABCDE"[right]}


_FORMS: dict[str, Callable[[Item], Item]] = {
    "preprocessed": _preprocessed,
    "belebele": _belebele,
    "winograd_schema": _winograd_schema,
    "minimal_pair": _minimal_pair,
    "arc_in_translation": _arc_in_translation,
    "arc_with_letters": _arc_with_letters,
}
_LISTED = yaml.safe_load(files("affinage.evaluation").joinpath("benchmarks.yaml").read_text(encoding="utf-8"))
BENCHMARKS = {
    name: Benchmark(name, one["definition"], tuple(one.get("files", ())), one.get("form", ""))
    for name, one in _LISTED["benchmarks"].items()
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
    """Whether it is one of the pocket world's benchmarks, or a name for all of them."""
    return task in (POCKET_WORLD, QUICKSTART, *POCKET_TASKS)


def is_task_file(task: str) -> bool:
    """Whether a benchmark is named by its task file, or by a folder of them."""
    return not of_pocket_world(task) and ("/" in task or task.endswith((".yaml", ".yml")))


def files_of(tasks: Sequence[str], data_dir: str | Path) -> list[Path]:
    """The files of a folder that these benchmarks and groups read, each once."""
    members = [member for task in tasks for member in GROUPS.get(task, (task,))]
    folder = from_home(data_dir)
    found = (BENCHMARKS[name].file_in(folder) for name in members if name in BENCHMARKS)
    return list(dict.fromkeys(file for file in found if file is not None))


def names_of(tasks: Sequence[str], data_dir: Path | None) -> tuple[list[str], list[str]]:
    """Groups spelled out, and with a `data_dir` the members of groups that it has no file of.

    Raises UserError for a benchmark that is named by itself and has no file there, or for a group that has none.
    """
    chosen: dict[str, None] = {}
    missing: list[str] = []
    for task in tasks:
        members = GROUPS.get(task, (task,))
        absent = [m for m in members if data_dir and m in BENCHMARKS and BENCHMARKS[m].file_in(data_dir) is None]
        if absent and len(absent) == len(members):
            wanted = f"{absent[0]}.jsonl" if len(absent) == 1 else ", ".join(f"{name}.jsonl" for name in absent)
            raise UserError(f"there are no items of `{task}` in {data_dir}", fix=f"Looked for {wanted} (or .jsonl.gz).")
        chosen |= dict.fromkeys(member for member in members if member not in absent)
        missing += absent
    return list(chosen), missing
