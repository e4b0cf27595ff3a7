"""Closed or full standard output ended in a traceback, and bytes that are no text were called half a surrogate pair."""

import errno
import io
import os
import subprocess
import sys

import pytest

from tiercel.base.errors import ConfigError
from tiercel.cli import list_, main
from tiercel.cli.run_request import read_piped


def tiercel(words, redirection):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = f'"{sys.executable}" -m tiercel {words} {redirection}'
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(closed):
    assert tiercel("--version", closed).returncode == 0


def test_what_goes_to_a_closed_error_stream_does_not_come_out_elsewhere():
    done = tiercel("rnu", "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_disk_is_one_line_and_exit_1(capsys, monkeypatch):
    def execute(args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(list_, "execute", execute)
    assert main.main(["list"]) == 1
    assert capsys.readouterr().err == "tiercel: output: No space left on device; need room and rights\n"


def test_piped_bytes_that_are_no_text_are_told_as_such():
    # As Python opens standard input in the C locale.
    stdin = io.TextIOWrapper(io.BytesIO(b"na\xefve"), "utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"standard input is not UTF-8 text \(character 2\)"):
        read_piped(stdin, io.StringIO())
