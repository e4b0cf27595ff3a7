"""Workers that compile: what ends one, and that the next request does not notice."""

import signal

import msgspec
import pytest
from grammar_kit import Forms, bpe_tokenizer

from tiercel.base.errors import RequestError
from tiercel.sampling import grammar_compiler
from tiercel.sampling.grammar_limits import GrammarLimits


@pytest.fixture
def workers(monkeypatch):
    """All workers that are started, slow at two forms."""
    started = []

    class Known(grammar_compiler._Worker):
        def __init__(self, start):
            super().__init__(start)
            started.append(self._process)

    monkeypatch.setattr(grammar_compiler, "_Worker", Known)
    monkeypatch.setattr(grammar_compiler, "_MODULE", "slow_grammar_worker")
    yield started
    assert all(process.poll() is not None for process in started), "a worker outlives its model"


@pytest.fixture
def make_forms(workers):
    made = []

    def make(**limits):
        made.append(Forms(bpe_tokenizer(), limits=GrammarLimits(n_workers=1, **limits)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_form_that_computes_for_ever_is_refused_and_the_next_compiles(make_forms, workers):
    forms = make_forms(regex_cpu_s=1, compile_wall_s=600)
    with pytest.raises(RequestError, match="more than 1 s of a processor"):
        forms.compile(regex="spin")
    assert workers[0].returncode == -signal.SIGXCPU
    forms.compile(regex="[a-z]")
    assert len(workers) == 2


def test_a_worker_that_does_nothing_is_ended_too(make_forms, workers):
    forms = make_forms(compile_wall_s=1)
    with pytest.raises(RequestError, match="gave no answer within 1 s"):
        forms.compile(regex="sleep")
    assert workers[0].returncode == -signal.SIGKILL


def test_a_worker_that_was_killed_between_two_requests_is_replaced(make_forms, workers):
    forms = make_forms()
    forms.compile(regex="[a-c]")
    forms.compile(regex="[a-d]")
    assert len(workers) == 1
    workers[0].kill()
    workers[0].wait()
    forms.compile(regex="[a-e]")
    assert len(workers) == 2


def test_the_least_recently_used_grammar_leaves_first(make_forms, monkeypatch):
    forms = make_forms(cache_bytes=1 << 20)
    compile_one = forms.grammars._compiler.compile
    # What the system gives a worker differs from run to run.
    monkeypatch.setattr(
        forms.grammars._compiler, "compile", lambda *form: msgspec.structs.replace(compile_one(*form), n_bytes=0)
    )
    first, second = forms.compile(regex="a"), forms.compile(regex="b")
    forms.grammars.limits = GrammarLimits(cache_bytes=first.n_bytes + second.n_bytes)
    assert forms.compile(regex="a") is first
    forms.compile(regex="c")
    forms.grammars.check()
    assert forms.compile(regex="a") is first
    assert forms.compile(regex="b") is not second


def test_a_grammar_that_is_larger_than_the_cache_is_kept_alone(make_forms):
    forms = make_forms(cache_bytes=1)
    first = forms.compile(regex="a")
    assert forms.compile(regex="a") is first
    second = forms.compile(regex="b")
    forms.grammars.check()
    assert forms.compile(regex="b") is second
    assert forms.compile(regex="a") is not first
