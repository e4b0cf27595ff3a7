"""Imports go down the list of layers in pyproject.toml, and the list is whole."""

import subprocess
import sys
import tomllib

import pytest
from source_tree import PACKAGE, ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def layers():
    contract = SETTINGS["tool"]["importlinter"]["contracts"][0]
    return {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}


def test_every_import_goes_down():
    pytest.importorskip("importlinter", reason="import-linter is not installed: pip install '.[test]'")
    # As `lint-imports` does, on this checkout, whatever is installed.
    script = (
        "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_part_of_the_package_has_its_layer():
    parts = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    parts |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert parts - layers() == set()


def test_what_is_installed_without_extras_needs_no_torch():
    assert [need for need in SETTINGS["project"]["dependencies"] if need.startswith(("torch", "transformers"))] == []
