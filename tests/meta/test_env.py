"""Every environment variable of ours stands in one table."""

import re

from source_tree import ROOT, files, named, text_of

from tiercel.base import env

MOST = 20
NAME = re.compile(r"\bTIERCEL(?:_[A-Z0-9]+)+\b")
# Variables that are read and are no settings, and why.
NOT_SETTINGS = {
    "TIERCEL_API_KEY": "a secret: read once by `serve`, never printed, so it is not in a table that `env` prints",
}
KNOWN = {variable.name for variable in env.TABLE} | set(NOT_SETTINGS)


def mentioned(paths):
    """Give each variable named in some files, with one of the files."""
    return {name: named(path) for path in paths for name in NAME.findall(text_of(path))}


def test_every_variable_in_the_source_is_in_the_table():
    found = mentioned(files("src", suffixes=(".py", ".toml")))
    assert {name: where for name, where in found.items() if name not in KNOWN} == {}


def test_every_variable_in_the_readme_is_in_the_table():
    assert set(mentioned([ROOT / "README.md"])) <= KNOWN


def test_every_variable_in_the_table_is_read_somewhere():
    declared = {variable.name: key for key, variable in vars(env).items() if isinstance(variable, env.EnvVar)}
    assert {variable.name for variable in env.TABLE} == set(declared)
    text = "".join(text_of(path) for path in files("src", suffixes=(".py",)))
    assert [name for name, key in declared.items() if not re.search(rf"\benv\.{key}\b", text)] == []


def test_there_are_at_most_twenty_variables():
    assert len(env.TABLE) <= MOST


def test_the_core_reads_no_environment():
    sources = files("native", suffixes=(".cpp", ".hpp"))
    assert [named(path) for path in sources if re.search(r"\bgetenv\b", text_of(path))] == []
