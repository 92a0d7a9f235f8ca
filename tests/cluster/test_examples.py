"""The files for other people's schedulers are valid, and what they run are commands of the program."""

import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from affinage.cli.program import app

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_the_syntax_is_right_and_every_command_and_option_exists(file: Path):
    text = file.read_text(encoding="utf-8")
    assert "Checked for syntax only" in text
    script = YAML(typ="safe").load(text)["run"] if file.suffix == ".yaml" else text
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    commands = re.findall(r"affinage (run|plan|launch)\b([^#\n;\"]*)", re.sub(r"^#.*", "", script, flags=re.MULTILINE))
    assert commands
    for verb, words in commands:
        command = get_command(app).commands[verb]  # type: ignore[attr-defined]
        assert set(re.findall(r"--[a-z-]+", words)) <= {name for each in command.params for name in each.opts}
