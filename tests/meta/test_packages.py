"""Packages and modules say what they are, and nothing holds state that nobody owns."""

import ast

import pytest
from source_tree import PACKAGE, named, python_files, tree_of

# What may stand in their `__init__` beside a docstring, and why.
WITH_CODE = {
    "src/tiercel/__init__.py": "re-exports, lazily, the names people import",
    "src/tiercel/_native/__init__.py": "re-exports the compiled core",
}
NAMELESS = {"utils", "util", "common", "misc", "helpers", "helper", "manager", "managers"}
MUTABLE = ("dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray")
FOLDER_MODULES = 3


def is_mutable(value):
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in MUTABLE


def is_constant(name):
    """Whether a global's name promises that it is filled once: a constant, or Python's own."""
    return name.lstrip("_").isupper() or (name.startswith("__") and name.endswith("__"))


def assigned(node):
    """Give the names that a module-level statement sets, and to what."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)], node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


@pytest.mark.parametrize("path", python_files("src", "tools"), ids=named)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(tree_of(path)), "a module begins with a docstring: what it is, what it does not know"


def test_a_package_init_holds_a_docstring_and_nothing_else():
    inits = [path for path in python_files("src") if path.name == "__init__.py" and named(path) not in WITH_CODE]
    assert [named(path) for path in inits if len(tree_of(path).body) != 1] == []


def test_no_module_is_named_after_nothing():
    names = [named(path) for path in python_files("src", "tests", "tools", "benchmarks")]
    assert [name for name in names if NAMELESS & set(name.removesuffix(".py").split("/"))] == []


def test_no_global_is_a_container_that_may_grow():
    found = [
        f"{named(path)}: {name}"
        for path in python_files("src")
        for node in tree_of(path).body
        for names, value in [assigned(node)]
        for name in names
        if is_mutable(value) and not is_constant(name)
    ]
    assert found == []


def test_no_function_writes_to_a_global():
    found = [
        f"{named(path)}:{node.lineno}"
        for path in python_files("src")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_a_folder_below_the_top_level_has_three_modules():
    folders = {path.parent for path in python_files("src") if path.parent.parent not in (PACKAGE.parent, PACKAGE)}
    small = [folder for folder in folders if len(list(folder.glob("*.py"))) < FOLDER_MODULES + 1]
    assert [named(folder) for folder in small] == []
