"""Print the sizes of the files and functions of folders, as the rows of the table in docs/comparison.md.

    python tools/code_sizes.py perfsuite optimized

Lines include blank ones, comments and docstrings; a function's do not include its decorators. Functions in functions
count, too.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

LONG = 60


def row(folder: Path) -> str:
    """Return the row of the Python files below a folder."""
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    if not texts:
        sys.exit(f"code_sizes: {folder} has no Python files; give a folder with some")
    files = [len(text.splitlines()) for text in texts]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    columns = [
        f"`{folder}/`",
        len(files),
        f"{statistics.median(files):g}",
        max(files),
        len(functions),
        f"{statistics.median(functions):g}" if functions else "–",
        max(functions, default="–"),
        sum(lines > LONG for lines in functions),
    ]
    return f"| {' | '.join(map(str, columns))} |"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("code_sizes: give one or more folders, as perfsuite optimized")
    for folder in sys.argv[1:]:
        print(row(Path(folder)))


if __name__ == "__main__":
    main()
