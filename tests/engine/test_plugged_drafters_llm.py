"""A drafter from outside the tree, named by `module_path`, through `LLM` and the server: it may do what it likes."""

import re
import sys
import threading

import httpx
import pytest

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.testing.tiny_model import write_tiny_model

PLUG_IN = '''
"""Knows the answer, or does one call as it is told."""

import sys

from tiercel.spec.drafters.interface import Proposal


def say(how):
    if how == "throw":
        raise ZeroDivisionError("a plug-in's bug")
    if how == "exit":
        sys.exit(3)
    return Proposal((-1, 7), (0.9, 0.8), None)


class Drafter:
    def __init__(self, answer, call="", how=""):
        self.answer, self.call, self.how = answer, call, how
        self.calls = []

    def does(self, call):
        self.calls.append(call)
        return say(self.how) if call == self.call else None

    def begin(self, prompt_ids, *, shares):
        self.does("begin")
        return Sequence(self)

    def check(self):
        self.calls.append("check")

    def close(self):
        self.calls.append("close")


class Sequence:
    def __init__(self, drafter):
        self.drafter, self.n = drafter, 0

    def extend(self, token_ids):
        self.n += len(token_ids)
        self.drafter.does("extend")

    def propose(self, n_max):
        wrong = self.drafter.does("propose")
        if wrong is not None:
            return wrong
        ids = tuple(self.drafter.answer[self.n : self.n + n_max])
        return Proposal(ids, tuple(0.9 ** (k + 1) for k in range(len(ids)))) if ids else None

    def end(self):
        self.drafter.does("end")
'''
PROMPT = "abcabcabc"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=list(range(97, 110)))
SMALL = {"threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16}
LONG_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(folder, speculative="off", **SMALL) as llm:
        return llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0]


@pytest.fixture
def plugged(folder, plain, tmp_path, monkeypatch):
    """Make an engine with the plug-in, which does `call` as `how` says."""
    (tmp_path / "plugged_drafter.py").write_text(PLUG_IN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def make(**options):
        config = {"method": "custom", "module_path": "plugged_drafter:Drafter", "num_speculative_tokens": 4}
        options = {"answer": list(plain.token_ids)} | options
        return LLM(folder, speculative_config=config | {"adaptive": False, "options": options}, **SMALL)

    yield make
    sys.modules.pop("plugged_drafter", None)


def settle(llm):
    """Wait until the drafter's thread has done all it was given, and the engine has told what came of it."""
    core = llm.client.core
    for put in (llm.engine.speculation._guarded.put, core.call_soon, core.call_soon):
        done = threading.Event()
        put(done.set)
        assert done.wait(LONG_S)


async def served(llm, n_requests):
    """Ask the server so often; return the texts, and /metrics."""
    facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
    app = make_app(facade, ServerSettings(served_names=("tiny",)))
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    texts = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for _ in range(n_requests):
            answer = await client.post("/v1/completions", json=body | {"allowed_token_ids": PARAMS.allowed_token_ids})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        settle(llm)
        text = (await client.get("/metrics")).text
    app.service.close()
    return texts, text


def counted(metrics, name):
    return float(re.search(rf"^{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)[1])


@pytest.mark.anyio
async def test_one_that_knows_what_comes_is_believed_and_closed(plugged, plain):
    with plugged() as llm:
        inner = llm.engine.speculation._guarded.inner
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == plain.token_ids
        texts, metrics = await served(llm, 2)
        assert texts == [plain.text] * 2
        assert counted(metrics, "vllm:spec_decode_num_accepted_tokens") > 0
        assert inner.calls.count("begin") == inner.calls.count("end") == 3
    assert inner.calls[-2:] == ["check", "close"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("call", "how"),
    [("propose", "throw"), ("propose", "nonsense"), ("propose", "exit"), ("begin", "exit"), ("end", "exit")],
)
async def test_one_that_fails_changes_no_answer_and_is_counted(plugged, plain, call, how):
    with plugged(call=call, how=how) as llm:
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == plain.token_ids
        texts, metrics = await served(llm, 2)
        assert texts == [plain.text] * 2
        assert counted(metrics, "tiercel:drafter_failures") == llm.stats()["n_failures"] == 3
        settle(llm)
        inner = llm.engine.speculation._guarded.inner
        assert inner.calls.count("end") == (0 if call == "begin" else 3)
