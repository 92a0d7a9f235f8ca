"""On a terminal, a line of a chat can be edited with the arrow keys, and the lines before it come back."""

import os
import pty
import subprocess
import sys
from pathlib import Path

LEFT, UP = b"\x1b[D", b"\x1b[A"
PROGRAM = """
import pathlib, sys
from affinage.cli.talk import _read_line
pathlib.Path(sys.argv[1]).write_text(repr([_read_line() for _ in range(3)]))
"""


def test_arrow_keys_edit_a_line_and_bring_back_those_before_it(tmp_path: Path):
    ours, theirs = pty.openpty()
    read = tmp_path / "read"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(read)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    left_out = b"bonjur" + 2 * LEFT + b"o"
    for number, typed in enumerate((left_out, b"salut", 2 * UP + b" !"), start=1):
        while shown.count(b"> ") < number:
            shown += os.read(ours, 1000)
        os.write(ours, typed + b"\r")
    while True:
        try:
            if not os.read(ours, 1000):
                break
        except OSError:  # Linux says so when the other side has gone
            break
    os.close(ours)
    assert process.wait(300) == 0
    assert read.read_text() == "['bonjour', 'salut', 'bonjour !']"
