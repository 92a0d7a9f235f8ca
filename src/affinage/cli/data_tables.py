"""What `affinage data stats` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from affinage.cli.terminal import counted, screen


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print the facts of a run's data as tables."""
    _table(
        ("stage", "documents", "MB", "removed"),
        [
            (name, _count(each["documents_out"]), f"{each['bytes_out'] / 1e6:.1f}", _removed(each.get("removed", {})))
            for name, each in facts["stages"].items()
        ],
    )
    if "groups" in facts:
        epochs = (facts["training"] or {}).get("epochs", {})
        lines = [(name, *_counts(each), _epochs(epochs.get(name))) for name, each in facts["groups"].items()]
        total = ("all", *_counts(facts["rows"]["train"]), "")
        _table(("trained on", "documents", "rows", "tokens", "bytes/token", "epochs"), [*lines, total])
        held_out = [(name, *_counts(each)) for name, each in facts["rows"]["validation"].items()]
        _table(("held out", "documents", "rows", "tokens", "bytes/token"), held_out)
        rows = facts["rows"]
        print(
            f"rows of {rows['context']} tokens ({rows['dtype']}), packing {rows['packing']}: "
            f"{rows['padding']:.3%} padding, {counted(rows['cut'], 'document')} cut that fit a row"
        )
    for name, each in facts.get("tokenizer", {}).get("languages", {}).items():
        print(f"{name}: {each['bytes_per_token']:.2f} bytes per token, {each['tokens_per_word']:.2f} tokens per word")


def _counts(each: Mapping[str, int]) -> tuple[str, ...]:
    spelled = f"{each['bytes'] / each['tokens']:.2f}" if each["tokens"] else "–"
    return (_count(each["documents"]), _count(each["rows"]), _count(each["tokens"]), spelled)


def _count(number: int) -> str:
    return f"{number:,}"


def _epochs(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"


def _removed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        right = number > 0 and title != "removed"
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "removed")
    for line in lines:
        table.add_row(*line)
    console = screen()
    console.print(table, highlight=False, markup=False)
    console.print()
