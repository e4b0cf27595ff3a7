"""Too many threads or too much memory ended in a traceback or an abort, or were promised and then not there."""

import subprocess
import sys

import pytest

from tiercel import LLM
from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.runner.capacity import plan
from tiercel.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_more_threads_than_any_machine_has_are_refused_by_name():
    with pytest.raises(ConfigError, match="threads: got 100000; at most 1024"):
        engine_options(threads=100_000)


def test_a_step_smaller_than_one_token_a_sequence_is_refused_and_not_raised():
    with pytest.raises(ConfigError, match="max_num_batched_tokens: got 16; at least max_num_seqs, which is 17"):
        engine_options(max_num_seqs=17, max_num_batched_tokens=16)
    assert engine_options(max_num_batched_tokens=16).max_num_batched_tokens == 16


def test_a_pool_larger_than_the_free_memory_is_refused():
    sizes = {"kv_token_bytes": 1024, "page_size_tokens": 16, "model_len_tokens": 2048, "max_model_len": None}
    with pytest.raises(OutOfPages, match="16 MiB of memory are free"):
        plan(**sizes, max_num_seqs=4096, pool_bytes=1 << 40, available_bytes=16 << 20)
    # What is not needed is not taken, so it need not be there.
    assert plan(**sizes, max_num_seqs=4, pool_bytes=1 << 40, available_bytes=16 << 20).n_pages == 512


def test_a_pool_of_no_page_is_not_told_to_shorten_to_nothing():
    with pytest.raises(OutOfPages) as caught:
        plan(
            kv_token_bytes=1024,
            page_size_tokens=16,
            model_len_tokens=2048,
            max_model_len=None,
            max_num_seqs=1,
            pool_bytes=100,
            available_bytes=1 << 30,
        )
    assert "lower max_model_len to 0" not in str(caught.value)


def test_arrays_that_no_memory_holds_are_refused_by_name(folder):
    with pytest.raises(OutOfPages, match="lower max_num_seqs, max_num_batched_tokens or kv_cache_memory_bytes"):
        LLM(str(folder), threads=1, max_num_batched_tokens=1 << 44)


LIMITED = """
import resource, sys
from tiercel import _native
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # a thread's stack takes 8 MiB of it
program = _native.Program("scalar", 1000)
kv = _native.make_kv(1, 16, "float32", [(1, 8)])
try:
    _native.StepRunner(program, kv, 1 << 12, (0, 64), 8, 1, 16, 16, 1, [], 8)
except (RuntimeError, MemoryError) as error:
    print(type(error).__name__)
"""


def test_threads_that_cannot_be_started_are_an_error_and_no_abort():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("RuntimeError", "MemoryError")
