"""Each newer architecture, tiny, through `LLM`, the server and preemption: a request gets what it gets alone."""

import httpx
import pytest

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.testing.tiny_model import SINK_CONFIG, write_tiny_model

MODELS = {"gpt-oss": SINK_CONFIG}
SMALL = {"threads": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 128}
PROMPTS = [list(range(5 + i, 45 + 3 * i)) for i in range(6)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, config=MODELS[request.param])


def answers(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SAMPLED, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [next(iter(e.values())).logprob for e in o.outputs[0].logprobs]) for o in outputs
    ]


@pytest.fixture(scope="module")
def alone(folder):
    """Each prompt in an engine of one slot, one after the other."""
    with LLM(str(folder), **SMALL | {"max_num_seqs": 1, "threads": 1, "async_scheduling": False}) as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"quantization": "q8_0"}], ids=["float", "q8_0"])
def test_more_requests_than_slots_get_what_each_gets_alone(folder, alone, options):
    with LLM(str(folder), **SMALL, **options) as llm:
        expected = alone if not options else [answers(llm, [prompt])[0] for prompt in PROMPTS]
        for _ in range(2):  # the second time from the prefix cache, where there is one
            assert answers(llm, PROMPTS) == expected


def test_preempted_requests_get_what_each_gets_alone(folder, alone):
    with LLM(str(folder), **SMALL) as llm:
        memory = SMALL["max_model_len"] * llm.engine.plan.info.kv_bytes_per_token()  # one of full length
    with LLM(str(folder), **SMALL, kv_cache_memory_bytes=memory) as llm:
        assert answers(llm, PROMPTS) == alone
        assert llm.client.snapshot.n_total_preemptions > 0


@pytest.mark.anyio
async def test_the_server_says_the_same(folder, alone):
    with LLM(str(folder), **SMALL) as llm:
        facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
        app = make_app(facade, ServerSettings(served_names=("tiny",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0.9, "seed": 4}
            answer = await client.post("/v1/completions", json=ask | {"ignore_eos": True, "logprobs": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == alone[0][1]
        app.service.close()
