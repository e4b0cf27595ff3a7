"""Scoring as lm-eval and others do it over HTTP (echo, logprobs, max_tokens 0 or 1) says what the offline API says.

A tiny checkpoint behind the real engine and server, asked with the official client; the same checkpoint offline.
"""

import openai
import pytest
from live import LiveServer

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, LATENT_CONFIG, MIXTURE_CONFIG, write_tiny_model

CONTEXT, ENDINGS = "The quick brown fox", (" jumps", " sleeps", " eats the dog")
SMALL = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class _Served:
    """What `LiveServer` needs of a rig, around an offline engine."""

    def __init__(self, llm):
        engine = llm.engine
        self.settings = ServerSettings(served_names=("tiny",), port=0)
        facade = EngineFacade(client=llm.client, tokenizer=engine.tokenizer, fingerprint="f00d")
        self.app = make_app(facade, self.settings)


@pytest.fixture(
    scope="module",
    params=[{}, MIXTURE_CONFIG, LATENT_CONFIG, ATTENTION_FREE_CONFIG],
    ids=["dense", "mixture", "latent", "attention-free"],
)
def llm(request, tmp_path_factory):
    with LLM(str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", config=request.param)), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm):
    served = _Served(llm)
    server = LiveServer(served)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
    server.close()
    served.app.service.close()


def offline(llm, ids):
    """Each prompt token's log-probability, and whether it was the likeliest, after the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [(entry[token_id].logprob, entry[token_id].rank == 1) for token_id, entry in entries]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_loglikelihoods_of_endings_are_the_offline_ones(llm, client, max_tokens, kind):
    texts = [CONTEXT + ending for ending in ENDINGS]
    ids = [list(text.encode()) for text in texts]
    prompt = texts if kind == "text" else ids
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, seed=1
    )
    assert len(answer.choices) == len(ENDINGS)
    for choice, prompt_ids in zip(answer.choices, ids, strict=True):
        expected = offline(llm, prompt_ids)
        told = choice.logprobs.token_logprobs
        assert len(told) == len(prompt_ids) + max_tokens
        assert told[0] is None
        scored = slice(1, len(prompt_ids))
        assert told[scored] == [pytest.approx(value, abs=1e-6) for value, _ in expected]
        # How lm-eval decides whether an ending is the greedy one: the likeliest of the position is the token itself.
        best = [max(top, key=top.get) for top in choice.logprobs.top_logprobs[scored]]
        is_greedy = [one == token for one, token in zip(best, choice.logprobs.tokens[scored], strict=True)]
        assert is_greedy == [greedy for _, greedy in expected]


def test_the_likeliest_ending_is_the_same_over_http_and_offline(llm, client):
    def over_http(ending):
        answer = client.completions.create(
            model="tiny", prompt=CONTEXT + ending, max_tokens=0, echo=True, logprobs=1, temperature=0
        )
        entries = answer.choices[0].logprobs
        first = next(i for i, offset in enumerate(entries.text_offset) if offset >= len(CONTEXT))
        return sum(entries.token_logprobs[first:])

    def here(ending):
        n = len(CONTEXT.encode())
        return sum(value for value, _ in offline(llm, list((CONTEXT + ending).encode()))[n - 1 :])

    assert [over_http(one) for one in ENDINGS] == [pytest.approx(here(one), abs=1e-5) for one in ENDINGS]


def test_prompt_logprobs_of_a_chat_are_those_of_its_prompt_offline(llm, client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        temperature=0,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True},
    )
    ids = answer.prompt_token_ids
    told = [
        entry[str(token_id)]["logprob"] for token_id, entry in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    assert told == [pytest.approx(value, abs=1e-6) for value, _ in offline(llm, ids)]
