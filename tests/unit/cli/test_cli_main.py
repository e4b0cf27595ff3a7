import os
import subprocess
import sys

import pytest

from tiercel.base.errors import ConfigError, DownloadError
from tiercel.cli import list_, main

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def python(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, **options)


@pytest.fixture
def failing(home, monkeypatch):
    """Make `tiercel list` raise."""

    def put(error):
        def execute(args):
            raise error

        monkeypatch.setattr(list_, "execute", execute)

    return put


def test_no_command_is_usage_and_exit_2(capsys):
    assert main.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: tiercel COMMAND" in said.err


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_lists_every_command(capsys, word):
    assert main.main([word]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name}" in said for name in main.COMMANDS)


def test_help_about_a_command_is_the_help_of_that_command(capsys):
    assert main.main(["help", "serve"]) == 0
    assert capsys.readouterr().out.startswith("usage: tiercel serve ")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_has_help(capsys, command):
    assert main.main([command, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: tiercel ")
    assert said.err == ""


def test_the_version_is_the_packages(capsys):
    import tiercel

    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiercel {tiercel.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main.main(["rnu"]) == 2
    assert "did you mean `tiercel run`?" in capsys.readouterr().err


def test_a_prompt_in_a_commands_place_is_told_how_to_ask(capsys):
    assert main.main(["Why is the sky blue?"]) == 2
    assert "tiercel run 'Why is the sky blue?'" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(DownloadError("no network"), 1), (ConfigError("no such"), 2)])
def test_an_error_of_ours_is_one_line_and_a_code(failing, capsys, error, code):
    failing(error)
    assert main.main(["list"]) == code
    assert capsys.readouterr().err == f"tiercel: {error}\n"


def test_the_traceback_is_shown_on_request(failing, capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_TRACEBACK", "1")
    failing(DownloadError("no network"))
    assert main.main(["list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("tiercel: no network\n")


def test_a_bad_value_of_a_variable_is_an_error(home, capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_TRACEBACK", "yes")
    assert main.main(["list"]) == 2
    assert "TIERCEL_TRACEBACK" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_no_traceback(failing, capsys):
    failing(KeyboardInterrupt())
    assert main.main(["list"]) == 130
    assert capsys.readouterr().err == "\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**ENVIRONMENT, "TIERCEL_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tiercel", "list"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_help_needs_no_part_of_the_engine():
    heavy = ("numpy", "argparse", "rich", "tokenizers", "huggingface_hub", "jinja2", "starlette", "msgspec")
    said = python("-c", f"import sys, tiercel.cli.main; print([name for name in {heavy} if name in sys.modules])")
    assert said.stdout.strip() == "[]"


def test_reading_the_flags_of_run_needs_no_part_of_the_engine():
    heavy = ("numpy", "rich", "tokenizers", "huggingface_hub", "jinja2", "starlette", "subprocess")
    script = (
        "import sys, io, contextlib\n"
        "from tiercel.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['run', '--help'])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert python("-c", script).stdout.strip() == "[]"


def test_the_module_runs_as_a_program():
    said = python("-m", "tiercel", "--version")
    assert (said.returncode, said.stderr) == (0, "")
