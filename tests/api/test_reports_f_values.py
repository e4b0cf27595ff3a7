"""Public reports about sampling values and lengths elsewhere, each tried here; `docs/reports.md` lists the rows."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from kit import GatedRunner, wait_until
from scripted import CHAT, COMPLETE, HI

ROUTES = {
    COMPLETE: {"prompt": "hello", "max_tokens": 8},
    CHAT: {"messages": HI, "max_tokens": 8},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"nan"', '"1"', "true", "[]", "{}")


def send(rig, path, **more):
    """Send a body with values written as they stand; give the status and the error's message."""
    fields = {name: json.dumps(value) for name, value in ROUTES[path].items()} | more
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    response = rig.ask("POST", path, content=body.encode(), headers={"content-type": "application/json"})
    answer = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    return response.status_code, json.dumps(answer)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", FLOATS)
def test_s28153_trtllm17158_what_is_no_number_is_refused_in_every_float_field(rig, path, name):
    for value in NOT_NUMBERS:
        status, answer = send(rig, path, **{name: value})
        assert status == 400, (value, answer)
    bias = send(rig, COMPLETE, logit_bias='{"1": NaN}')
    assert bias[0] == 400


WRONG = {"temperature": 5, "top_p": 0, "min_p": 2, "frequency_penalty": 100, "top_k": -2, "presence_penalty": -9}


@pytest.mark.parametrize("name", WRONG)
def test_v47494_every_route_refuses_the_same_values(rig, name):
    for path in ROUTES:
        status, answer = send(rig, path, **{name: json.dumps(WRONG[name])})
        assert status == 400, (path, answer)
        assert name in answer, (path, answer)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("ids", [[151645], [264], [-1], [2**31], [2**63]])
def test_v54195_stop_tokens_outside_the_vocabulary_are_refused(rig, ids, min_tokens):
    for path in (COMPLETE, CHAT):
        error = rig.refused(path, ROUTES[path] | {"stop_token_ids": ids, "min_tokens": min_tokens})
        assert error["param"].startswith("stop_token_ids")


def test_v48824_a_bad_word_behind_the_models_vocabulary_writes_nowhere(make_rig):
    """More tokens than logits: the words that need the missing ones are refused."""
    rig = make_rig(limits={"vocab_size": 258}, eos_ids=(256,))  # one token, <|im_end|>, has no logit
    error = rig.refused(COMPLETE, ROUTES[COMPLETE] | {"bad_words": ["<|im_end|>"]})
    assert error["param"] == "bad_words"
    assert rig.complete(bad_words=["ab"])["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_v6707_without_max_tokens_the_answer_fills_what_is_left(rig, fields):
    prompt = [ord("x")] * 255  # of a context of 256
    body = {"messages": [{"role": "user", "content": "x" * 100}], "ignore_eos": True} | fields
    answer = rig.post(CHAT, body)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"
    assert rig.complete(prompt=prompt, max_tokens=None)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("n", [10**9, 2**63 - 1, 2**63, 10**30, 129, 0, -1])
def test_cve202634756_a_huge_number_of_answers_is_refused_before_anything_is_made(rig, n):
    for path in (COMPLETE, CHAT):
        assert send(rig, path, n=str(n))[0] == 400


def test_v51226_a_seed_counts_whoever_runs_beside_it(make_rig):
    rig = make_rig()
    alone = rig.complete(seed=42, temperature=1.0, return_token_ids=True)["choices"][0]["token_ids"]

    async def together():
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            ask = {"prompt": "hello", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
            bodies = [ask | {"seed": 42}, ask, ask | {"seed": None}]
            answers = await asyncio.gather(*(client.post(COMPLETE, json=body) for body in bodies))
        return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    several = [asyncio.run(together()) for _ in range(5)]
    assert [one[0] for one in several] == [alone] * 5
    assert len({tuple(ids) for one in several for ids in one[1:]}) == 10


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_habanavllm773_any_seed_of_64_bits_is_taken(rig, seed):
    first, second = (rig.complete(seed=seed, temperature=1.0)["choices"][0]["text"] for _ in range(2))
    assert (first == second) is (seed != -1)  # vLLM's word for any
    assert rig.chat(seed=seed)["choices"]


@pytest.mark.parametrize("name", ["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"])
@pytest.mark.parametrize("value", ["true", 1, 0, "", []])
def test_llamafile160_a_text_or_number_for_a_truth_value_is_refused(rig, name, value):
    for path in (COMPLETE, CHAT):
        assert rig.refused(path, ROUTES[path] | {name: value})["param"] == name


# Lengths.


@pytest.mark.parametrize("path", ROUTES)
def test_lmstudio2339_a_prompt_over_the_context_is_refused_with_both_numbers(rig, path):
    body = ROUTES[path] | {COMPLETE: {"prompt": [5] * 256}}.get(
        path,
        {"input": "x" * 256} if "input" in ROUTES[path] else {"messages": [{"role": "user", "content": "x" * 256}]},
    )
    response = rig.ask("POST", path, json=body)
    assert response.status_code == 400
    message = json.dumps(response.json())
    assert "256" in message
    assert "shorten" in message


def test_lmstudio2339_a_prompt_of_just_the_context_is_told_its_count(rig):
    for n in (256, 257, 300):
        error = rig.refused(COMPLETE, {"prompt": [5] * n, "max_tokens": 1})
        assert f"{n} tokens" in error["message"]
        assert "context of 256" in error["message"]
    assert rig.complete(prompt=[5] * 255, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("max_tokens", [257, 10_000, 2**40])
def test_aprender665_more_tokens_than_the_context_are_refused(rig, max_tokens):
    for path in (COMPLETE, CHAT):
        error = rig.refused(path, ROUTES[path] | {"max_tokens": max_tokens})
        assert error["param"] == "max_tokens"
        assert "256" in error["message"]


def test_l3969_without_an_end_the_context_ends_the_answer(make_rig):
    """Nothing is shifted out of a full context: the answer ends there, and says so."""
    rig = make_rig(limits={"max_len_tokens": 32})
    answer = rig.chat(max_tokens=None, messages=[{"role": "user", "content": ""}])
    assert answer["usage"]["total_tokens"] == 32
    assert answer["choices"][0]["finish_reason"] == "length"


def test_v25538_two_that_do_not_fit_together_both_come_to_their_end(make_rig):
    """A pool of little more than one of them: who is preempted still gets on."""
    rig = make_rig(runner=GatedRunner, limits={"n_pages": 9, "max_len_tokens": 32}, max_num_batched_tokens=32)

    async def together():
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            ask = {"max_tokens": 19, "ignore_eos": True, "return_token_ids": True, "seed": 3}
            bodies = [ask | {"prompt": letter * 12} for letter in "abc"]
            return [r.json() for r in await asyncio.gather(*(client.post(COMPLETE, json=body) for body in bodies))]

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(asyncio.run, together())
        wait_until(lambda: len(rig.client._owners) == 3)
        rig.runner.open()
        answers = asked.result()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [19] * 3
    assert rig.core.snapshot.n_total_preemptions > 0
    alone = rig.complete(prompt="a" * 12, max_tokens=19, return_token_ids=True)["choices"][0]["token_ids"]
    assert answers[0]["choices"][0]["token_ids"] == alone
    rig.assert_idle()


def test_v25538_a_preempted_request_can_be_aborted(make_rig):
    rig = make_rig(runner=GatedRunner, limits={"n_pages": 9, "max_len_tokens": 32}, max_num_batched_tokens=32)
    handles = [rig.client.submit({"prompt_token_ids": [65 + i] * 12}) for i in range(2)]
    rig.runner.let(16)
    wait_until(lambda: rig.core.snapshot.n_total_preemptions > 0)
    for handle in handles:
        handle.close()
    rig.runner.open()
    rig.assert_idle()
