"""A verb that shows its example where it is given too little."""

import re
from typing import Any

import typer
from typer.core import TyperCommand

_EXAMPLE = re.compile(r"^Examples?: (.+)$", re.MULTILINE)  # in the docstring of a verb


class Verb(TyperCommand):
    """A command whose message about a missing argument or option ends with the first example of its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As the command's; of a parameter that is missing the error has the example, too."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            example = _EXAMPLE.search(self.help or "")
            if example and not error.message:  # one that is given wrongly has a message of its own
                error.message = f"For example: {example[1]}"
            raise


def show_examples(app: typer.Typer) -> None:
    """Make `Verb`s of all verbs that are registered, those of groups, too."""
    for verb in app.registered_commands:
        verb.cls = Verb
    for group in app.registered_groups:
        if group.typer_instance is not None:
            show_examples(group.typer_instance)
