"""A program that ended without `close` printed pages of "leaked instance", and aborted if a request was still running.

A forked process hung: on its first request, and again when it freed the engine, as its threads are not there. And an
engine that was closed kept its weights and pages for as long as somebody held the object.
"""

import gc
import os
import subprocess
import sys
import threading

import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import EngineDead
from tiercel.testing.tiny_model import write_tiny_model

START = """
import os, sys
from tiercel import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=2, max_num_seqs=4)
endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
print(len(llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))
"""
FORK = """
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        llm.generate("hello", endless, use_tqdm=False)
    except Exception as error:
        print(type(error).__name__)
    llm.close()
    del llm
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(len(llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def run(code, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", START + code, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "held = [llm]; held.append(held)"])
def test_an_idle_engine_that_is_left_open_ends_in_silence(folder, end):
    done = run(end, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_a_program_may_end_while_requests_run(folder):
    done = run("handles = [llm.client.submit('hello', endless) for _ in range(9)]; next(handles[0])", folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_programs_own_error_is_all_that_is_printed(folder):
    done = run("handle = llm.client.submit('hello', endless)\nraise ValueError('its own')", folder)
    assert done.returncode == 1
    assert "leaked" not in done.stderr
    assert done.stderr.endswith("ValueError: its own\n")


def test_a_forked_process_is_refused_and_can_end(folder):
    done = run(FORK, folder)
    assert done.stdout.split() == ["3", "EngineDead", "7", "1"]
    assert done.stderr == ""


def test_an_engine_that_is_dropped_ends_its_threads(folder):
    n_before = threading.active_count()
    llm = LLM(str(folder), threads=1, max_num_seqs=2)
    client = llm.client
    assert threading.active_count() > n_before
    del llm
    gc.collect()
    assert threading.active_count() == n_before
    with pytest.raises(EngineDead):
        client.submit("hello", SamplingParams(max_tokens=1))


def test_closing_gives_back_pages_and_weights_though_somebody_holds_the_object(folder):
    llm = LLM(str(folder), threads=1, max_num_seqs=2)
    page = llm.engine.runner.kv
    assert page is not None
    llm.close()
    assert llm.engine.runner.kv is None
    assert sys.getrefcount(page) == 2  # this name and the argument: the native runner has let go
