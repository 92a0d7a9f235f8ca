"""The table of rooms and the walks in docs/architecture.md say what the code does."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "affinage"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ANYWHERE = {"errors", "differing", "stopping", "secrets", "signing", "durations", "paths"}
IMPORT = re.compile(r"^\s*(?:from|import) affinage\.(\w+)", re.MULTILINE)


def imported(room: str) -> set[str]:
    found = {name for file in (SOURCE / room).rglob("*.py") for name in IMPORT.findall(file.read_text("utf-8"))}
    return found - ANYWHERE - {room}


def test_every_room_is_in_the_table_with_the_rooms_that_it_imports():
    rooms = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*) \|$", TEXT, re.MULTILINE)
    assert {room for room, _ in rows} == rooms
    for room, said in rows:
        stated = set(re.findall(r"`(\w+)`", said)) if said != "all below" else rooms - {"cli"}
        if room == "cli":
            assert imported(room) <= stated | {"api"}
        else:
            assert stated == imported(room), room


def test_every_file_that_it_names_is_there():
    named = re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", TEXT)
    assert len(named) > 20
    missing = [name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()]
    assert not missing
