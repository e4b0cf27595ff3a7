"""What must not stand in the project: what runs a stranger's code, what nobody will do, what one machine has."""

import ast
import re

import pytest
from source_tree import files, named, python_files, text_of, tree_of

# Spelt so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(root|work)/\w")
INDEX_HOSTS = re.compile(r"(pypi|pythonhosted|anaconda)[.](org|io|com)|download[.]pytorch[.]")
TASKS = re.compile(r"\b(TO(?:DO)(?!\(#\d+\))|FIX(?:ME)|XX(?:X)|HA(?:CK))\b")
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
IMPORTS_THAT_RUN_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "torch"}
# Training computes with torch. What loads a pickle is refused there too.
TRAINING = "src/tiercel/train/"
TORCH_THAT_RUNS_CODE = {"load", "save", "hub", "jit", "package", "compile"}


def lines_with(pattern):
    return [
        f"{named(path)}:{i}"
        for path in files()
        for i, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]


def imports_of(tree):
    """Give the top-level names that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def is_name(node, name):
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.parametrize("path", python_files("src"), ids=named)
def test_nothing_of_a_model_is_ever_run(path):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert {node.func.id for node in calls if isinstance(node.func, ast.Name)} & RUNS_CODE == set()
    assert "trust_remote_code" not in {keyword.arg for node in calls for keyword in node.keywords}
    imports = set(imports_of(tree_of(path)))
    if named(path).startswith(TRAINING):
        used = {n.attr for n in ast.walk(tree_of(path)) if isinstance(n, ast.Attribute) and is_name(n.value, "torch")}
        assert used & TORCH_THAT_RUNS_CODE == set()
        imports.discard("torch")
    assert imports & IMPORTS_THAT_RUN_CODE == set()


def test_what_is_left_to_do_names_its_issue():
    assert lines_with(TASKS) == []


def test_no_file_names_a_place_of_one_machine():
    assert lines_with(MACHINE_PATHS) == []


def test_no_file_names_the_host_of_a_package_index():
    assert lines_with(INDEX_HOSTS) == []


def test_what_is_looked_for_would_be_found():
    assert MACHINE_PATHS.search("in " + "/" + "root/x.gguf")
    assert INDEX_HOSTS.search("from " + "pypi" + ".org")
    assert TASKS.search("# TO" + "DO: later")
    assert not TASKS.search("# TO" + "DO(#7): later")
