"""docs/tour.md, CONTRIBUTING.md and README.md name only what exists, so that a newcomer does not get lost."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.md"
DOCUMENTS = (TOUR, ROOT / "CONTRIBUTING.md", ROOT / "README.md")
TOPS = ("src/", "native/", "tests/", "docs/", "tools/", "benchmarks/")
MAX_LINES = 170


def references(document):
    """Give (path, symbol or None) for each name in a document; `::symbol` belongs to the file named last."""
    last = None
    found = []
    for word in re.findall(r"`([^`\s<*]+)`", document.read_text(encoding="utf-8")):
        if word.startswith("::") and word != "::symbol":
            assert last is not None, f"{word}: no file is named before it"
            found.append((last, word[2:]))
        elif word.startswith(TOPS):
            last, _, symbol = word.partition("::")
            found.append((last, symbol or None))
    return found


def names_in(body):
    """Give the names that statements define, with what defines each."""
    names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return names


@cache
def top_level(path):
    return names_in(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)


def is_in_python(path, symbol):
    names = top_level(path)
    for part in symbol.split("."):
        if part not in names:
            return False
        names = names_in(getattr(names[part], "body", []))
    return True


def is_in_cpp(path, symbol):
    text = re.sub(r"//[^\n]*", "", (ROOT / path).read_text(encoding="utf-8"))
    if "::" in symbol:
        return re.search(rf"\b{re.escape(symbol)}\(", text) is not None
    return re.search(rf"\b(struct|class) {symbol} |\b{symbol}\(", text) is not None


def exists(path, symbol):
    is_there = (ROOT / path).exists()
    if symbol is None or not is_there:
        return is_there
    return is_in_python(path, symbol) if path.endswith(".py") else is_in_cpp(path, symbol)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document):
    named = references(document)
    assert len(named) > 1
    assert [f"{path}::{symbol}" for path, symbol in named if not exists(path, symbol)] == []


@pytest.mark.parametrize(
    ("path", "symbol"),
    [
        ("src/tiercel/no_such_file.py", None),
        ("src/tiercel/engine/scheduler.py", "Scheduler.no_such_method"),
        ("src/tiercel/engine/scheduler.py", "plan"),
        ("native/src/step_runner.cpp", "StepRunner::no_such_method"),
        ("native/src/program.cpp", "replay_all"),
    ],
)
def test_what_is_not_there_is_noticed(path, symbol):
    assert not exists(path, symbol)


def test_the_tour_visits_every_package():
    text = TOUR.read_text(encoding="utf-8")
    packages = sorted(path.parent.name for path in (ROOT / "src/tiercel").glob("*/__init__.py"))
    assert [name for name in packages if f"src/tiercel/{name}" not in text] == []


def test_the_tour_is_two_pages():
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
