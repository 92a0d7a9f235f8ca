"""Whether `make test` notices when a central line is wrong: each one is changed in a copy, and its tests are run.

    python benchmarks/mutations.py [--quick]

mutations.yaml lists the lines. A wrong line that no test fails for is printed as SURVIVED, and ends the benchmark with
status 1. `--quick` tries one.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from measuring import finish, options_of, result

ROOT = Path(__file__).parents[1]


def failing(scratch: Path, tests: str, deselected: list[str]) -> str:
    """Return the first test that fails in the copy of the repository, or an empty string."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--no-header", "-rfE", "-m", "not full", tests]
    command += [word for name in deselected for word in ("--deselect", name)]
    environment = {**os.environ, "PYTHONPATH": str(scratch / "src")}
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=1200)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    if failed is None and done.returncode:
        raise SystemExit(f"{tests} could not be run: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return failed[1] if failed else ""


def caught_by(mutation: dict[str, str], scratch: Path) -> str:
    """Return the first test that fails with the line changed and passes without, or an empty string."""
    file = scratch / "src" / "affinage" / mutation["file"]
    text = file.read_text(encoding="utf-8")
    tests = mutation.get("tests", f"tests/{Path(mutation['file']).parts[0]}")
    if text.count(mutation["right"]) != 1:
        raise SystemExit(f"{mutation['file']}: {text.count(mutation['right'])} times {mutation['right']}")
    red: list[str] = []
    while True:
        file.write_text(text.replace(mutation["right"], mutation["wrong"]), encoding="utf-8")
        test = failing(scratch, tests, red)
        file.write_text(text, encoding="utf-8")
        if not test or not failing(scratch, test, []):
            return test
        print(f"fails without a mutation, too: {test}", file=sys.stderr, flush=True)
        red.append(test)


def main() -> None:
    quick = options_of(__doc__).parse_args().quick
    mutations = yaml.safe_load((Path(__file__).parent / "mutations.yaml").read_text(encoding="utf-8"))
    tried, caught = mutations[: 1 if quick else None], 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in ("src", "tests", "recipes", "examples"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        for mutation in tried:
            test = caught_by(mutation, scratch)
            caught += bool(test)
            print(f"{mutation['name']:45} {test or 'SURVIVED'}", flush=True)
    finish("mutations", [result("mutations caught", caught, "mutations", len(tried))])
    sys.exit(caught < len(tried))


if __name__ == "__main__":
    main()
