"""The project's own files, for the tests of this folder. Reads the checkout; needs no git."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tiercel"
_FOLDERS = (".ci", "benchmarks", "changes", "docs", "examples", "native", "src", "tests", "tools")
_NOT_OURS = {"__pycache__", ".hypothesis", ".pytest_cache"}


def files(*folders, suffixes=None):
    """Give the files under some of the project's folders (all, and those at its top, by default), sorted."""
    found = [] if folders else [path for path in ROOT.iterdir() if path.is_file()]
    for folder in folders or _FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if not _NOT_OURS & set(path.parts) and suffixes_fit(path, suffixes))


def suffixes_fit(path, suffixes):
    if path.suffix in (".pyc", ".so"):
        return False
    return suffixes is None or path.suffix in suffixes


def named(path):
    """Give a file's name as messages have it: from the root."""
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path):
    """Give a file's text; bytes that are no UTF-8 are replaced, as only our own words are looked for."""
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def tree_of(path):
    """Give a Python file's syntax tree."""
    return ast.parse(text_of(path), str(path))


def python_files(*folders):
    return files(*folders, suffixes=(".py",))


def functions_of(path):
    """Give every function and method of a Python file, nested ones too."""
    return [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
