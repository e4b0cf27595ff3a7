"""No file and no function outgrows its reader: the column "stop" of the house style's section 3."""

from source_tree import files, functions_of, named, python_files, text_of

PYTHON_LINES = 800
FUNCTION_LINES = 100
CPP_LINES = 1000
PARAMETERS = 10

# Name -> why. Generated tables only: a file that grew is cut where one half can be explained without the other.
EXEMPT_FILES = {}
# "path::function" -> why.
EXEMPT_FUNCTIONS = {}


def lines_of(path):
    return text_of(path).count("\n") + 1


def parameters_of(function):
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return [arg.arg for arg in every if arg.arg not in ("self", "cls")]


def too_long(paths, limit):
    return {named(p): lines_of(p) for p in paths if lines_of(p) > limit and named(p) not in EXEMPT_FILES}


def test_no_python_file_is_longer_than_800_lines():
    assert too_long(python_files("src", "tests", "tools", "benchmarks"), PYTHON_LINES) == {}


def test_no_cpp_file_is_longer_than_1000_lines():
    assert too_long(files("native", suffixes=(".cpp", ".hpp")), CPP_LINES) == {}


def test_no_function_is_longer_than_100_lines():
    lengths = {
        f"{named(path)}::{f.name}": f.end_lineno - f.lineno + 1
        for path in python_files("src", "tests", "tools", "benchmarks")
        for f in functions_of(path)
    }
    assert {k: n for k, n in lengths.items() if n > FUNCTION_LINES and k not in EXEMPT_FUNCTIONS} == {}


def test_no_function_has_more_than_10_parameters():
    counts = {
        f"{named(path)}::{f.name}": len(parameters_of(f))
        for path in python_files("src", "tools")
        for f in functions_of(path)
    }
    assert {k: n for k, n in counts.items() if n > PARAMETERS and k not in EXEMPT_FUNCTIONS} == {}
