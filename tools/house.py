"""The size of the house: lines of source and tests, the longest files and functions, how much has a docstring.

python tools/house.py [ROOT]
"""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

LONGEST = 5
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Named(NamedTuple):
    lines: int
    name: str


def lines_of(folder: Path) -> list[Named]:
    """Every Python file below a folder with its lines, the longest first."""
    files = folder.rglob("*.py")
    found = (Named(len(file.read_text("utf-8").splitlines()), str(file.relative_to(folder))) for file in files)
    return sorted(found, reverse=True)


def functions_of(folder: Path) -> tuple[list[Named], int, int]:
    """(functions, the longest first; public classes and functions; those of them that have a docstring)."""
    found, public, told = [], 0, 0
    for file in folder.rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, Function):
                where = f"{file.relative_to(folder)}:{node.name}"
                found.append(Named((node.end_lineno or node.lineno) - node.lineno + 1, where))
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                public, told = public + 1, told + (ast.get_docstring(node) is not None)
    return sorted(found, reverse=True), public, told


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    source, tests = lines_of(root / "src" / "affinage"), lines_of(root / "tests")
    written, tested = sum(file.lines for file in source), sum(file.lines for file in tests)
    functions, public, told = functions_of(root / "src" / "affinage")
    print(f"source  {written:,} lines in {len(source)} files, {written / len(source):.0f} on average")
    print(f"tests   {tested:,} lines in {len(tests)} files, {tested / written:.2f} of the source")
    print(f"docstrings: {told:,} of {public:,} public classes and functions, {told / public:.0%}")
    print("longest files:    ", ", ".join(f"{name} {lines}" for lines, name in source[:LONGEST]))
    print("longest functions:", ", ".join(f"{name} {lines}" for lines, name in functions[:LONGEST]))


if __name__ == "__main__":
    main()
