"""The build keeps each instruction set's code apart.

Kernels are compiled once a level. A function that the linker may merge (a weak symbol, such as an inline one of a
header) and that was compiled for AVX-512 could become the copy that everybody calls; an older processor would then die
of an illegal instruction. So a kernel's object file defines no weak symbol at all.
"""

import re
import shutil
import subprocess

import pytest
from source_tree import ROOT

WEAK = "wWvVu"
# Where scikit-build-core leaves the object files of `pip install .` (pyproject.toml, build-dir).
OBJECTS = "build/*/CMakeFiles/tiercel_kernels_*.dir/**/*.o"


def symbols_of(paths):
    """Give (type, demangled name) of each symbol that object files define."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed: what the compiler left in the object files cannot be read")
    command = [nm, "--demangle", "--defined-only", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return re.findall(r"^[0-9a-f]{16} (\w) (.+)$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def symbols():
    paths = sorted(ROOT.glob(OBJECTS))
    if not paths:
        pytest.skip(f"no object files at {OBJECTS}: the core was not built in this checkout")
    return symbols_of(paths)


def test_no_kernel_symbol_is_weak(symbols):
    assert sorted({name for kind, name in symbols if kind in WEAK}) == []


def test_every_kernel_symbol_is_in_its_levels_namespace(symbols):
    shared = {
        name for kind, name in symbols if kind.isupper() and not re.match(r"tiercel::(scalar|avx2|avx512)::", name)
    }
    assert sorted(shared) == []


def test_every_level_brings_its_table(symbols):
    tables = {name for _, name in symbols if re.fullmatch(r"tiercel::\w+::table", name)}
    assert "tiercel::scalar::table" in tables
