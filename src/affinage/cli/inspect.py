"""Verbs that look and change nothing: `graph`, `doctor`."""

import typer

from affinage.cli import doctor


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("doctor")(doctor.doctor)
