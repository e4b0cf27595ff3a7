"""`_core.pyi` says what the built core has: every name, every method, every argument."""

import ast
import re

import pytest
from source_tree import PACKAGE, tree_of

from tiercel._native import _core

STUB = tree_of(PACKAGE / "_native" / "_core.pyi")
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def is_public(name):
    return not name.startswith("_")


def members(node):
    """Give a stub class's methods by name, its constructor as `__init__`."""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if "__new__" in methods:
        methods["__init__"] = methods.pop("__new__")
    return methods


def is_property(function):
    return any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)


def arguments(function):
    """Give the arguments as (name, how it is passed, whether it may be left out), without self or cls."""
    args = function.args
    by_place = [*args.posonlyargs, *args.args]
    n_needed = len(by_place) - len(args.defaults)
    rows = [
        (arg.arg, "place only" if i < len(args.posonlyargs) else "place or name", i >= n_needed)
        for i, arg in enumerate(by_place)
    ]
    by_name = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    rows += [(arg.arg, "name only", value is not None) for arg, value in by_name]
    return [row for row in rows if row[0] not in ("self", "cls")]


def built(function):
    """Parse what nanobind says of a function's arguments."""
    text = function.__nb_signature__[0][0]
    text = re.sub(r"\\\d+", "None", text)  # defaults are numbered
    text = re.sub(r"ndarray\[[^\]]*\]", "ndarray", text)
    return ast.parse(text + ": ...").body[0]


def test_the_stub_names_what_the_module_has():
    assert {name for name in dir(_core) if is_public(name)} == {*CLASSES, *FUNCTIONS}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_members_of_its_stub(name):
    found = {member for member in vars(getattr(_core, name)) if is_public(member)}
    assert found == {member for member in members(CLASSES[name]) if is_public(member)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_arguments_of_its_stub(name):
    assert arguments(built(getattr(_core, name))) == arguments(FUNCTIONS[name])


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_has_the_arguments_of_its_stub(name):
    for member, stub in members(CLASSES[name]).items():
        here = vars(getattr(_core, name)).get(member)
        if is_property(stub):
            assert isinstance(here, property), f"{name}.{member} is no property"
        else:
            assert arguments(built(here)) == arguments(stub), f"{name}.{member}"
