"""Paths as users write them."""

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """The path with `~` and `~name` as a shell reads them; a home that nobody has stays as it is written."""
    return Path(os.path.expanduser(path))
