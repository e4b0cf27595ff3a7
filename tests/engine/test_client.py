"""The client over an engine on its own thread: text, streams, refusals, ends."""

import asyncio
import random
import threading

import pytest
from engine_kit import LetterTokenizer, make_client

from tiercel.base.errors import EngineDead, PromptTooLong, QueueFull, RequestError, RequestFailed
from tiercel.protocol.params import RequestOutputKind, SamplingParams
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LETTERS = LetterTokenizer()


@pytest.fixture
def client():
    client = make_client()
    yield client
    client.close()
    assert_empty(client)


def assert_empty(client):
    """Nothing is held by anybody."""
    assert client._owners == {}
    assert client._requests == {}
    scheduler = client.core._scheduler
    scheduler.check()
    scheduler.check_idle()


def greedy(**params):
    return SamplingParams(temperature=0.0, **({"max_tokens": 12} | params))


def tokens_of(text, n, **params):
    return expected_tokens(LETTERS.encode(text), n, greedy(**params))


def text_of(text, n):
    return LETTERS.decode(tokens_of(text, n))


def last(outputs):
    *_, output = outputs
    return output


def test_a_prompt_gets_its_text(client):
    output = last(client.submit("hello", greedy()))
    assert output.finished
    assert output.prompt == "hello"
    assert output.prompt_token_ids == LETTERS.encode("hello")
    assert output.outputs[0].token_ids == tokens_of("hello", 12)
    assert output.outputs[0].text == text_of("hello", 12)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    assert output.num_cached_tokens == 0
    assert output.metrics.arrival_s <= output.metrics.first_scheduled_s <= output.metrics.first_token_s


@pytest.mark.parametrize(
    "prompt", [LETTERS.encode("abc"), {"prompt": "abc"}, {"prompt_token_ids": LETTERS.encode("abc")}]
)
def test_a_prompt_may_have_any_shape(client, prompt):
    assert last(client.submit(prompt, greedy())).outputs[0].text == text_of("abc", 12)


def test_deltas_together_are_the_whole(client):
    outputs = list(client.submit("hello", greedy(output_kind=DELTA, logprobs=1)))
    assert "".join(o.outputs[0].text for o in outputs if o.outputs) == text_of("hello", 12)
    assert [i for o in outputs for i in o.outputs[0].token_ids] == tokens_of("hello", 12)
    assert [next(iter(p)) for o in outputs for p in o.outputs[0].logprobs] == tokens_of("hello", 12)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_final_only_gives_one_output(client):
    (output,) = client.submit("hello", greedy(output_kind=FINAL))
    assert output.outputs[0].text == text_of("hello", 12)


def test_a_slow_reader_gets_fewer_and_larger_outputs(client):
    handle = client.submit("hello", greedy(output_kind=DELTA))
    last(client.submit("other", greedy(max_tokens=40)))  # meanwhile the first has ended
    (output,) = handle
    assert output.outputs[0].text == text_of("hello", 12)


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 12), (4, [1, 4, 4, 3]), (11, [1, 11]), (20, [1, 11])])
def test_a_streams_outputs_have_as_many_tokens_as_asked_for(interval, sizes):
    client = make_client(starts=False, stream_interval=interval)
    handle = client.submit("hello", greedy(output_kind=DELTA, logprobs=0))
    outputs = []
    while client.core.step_once():
        if handle._state.has_news:
            outputs.append(next(handle))
    outputs += handle  # the last step's
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert [len(output.outputs[0].logprobs) for output in outputs] == sizes
    assert "".join(output.outputs[0].text for output in outputs) == text_of("hello", 12)
    assert outputs[-1].finished
    client.close()


@pytest.mark.parametrize(
    ("own", "engines", "sizes"), [(4, 1, [1, 4, 4, 3]), (2, 4, [1, 4, 4, 3]), (None, 4, [1, 4, 4, 3])]
)
def test_a_requests_stream_interval_holds_unless_the_engines_is_larger(own, engines, sizes):
    client = make_client(starts=False, stream_interval=engines)
    handle = client.submit("hello", greedy(output_kind=DELTA, stream_interval=own))
    outputs = []
    while client.core.step_once():
        if handle._state.has_news:
            outputs.append(next(handle))
    outputs += handle
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert "".join(output.outputs[0].text for output in outputs) == text_of("hello", 12)
    client.close()


def test_a_stream_that_is_aborted_between_two_outputs_ends(client):
    slow = make_client(starts=False, stream_interval=50)
    handle = slow.submit("hello", greedy(max_tokens=40, output_kind=DELTA))
    while not handle._state.has_news:
        slow.core.step_once()
    assert len(next(handle).outputs[0].token_ids) == 1
    slow.core.step_once()
    slow.core.step_once()
    handle.abort()
    while slow.core.step_once():
        pass
    (output,) = handle
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) > 0
    slow.close()


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_the_text_and_the_sequence(client, included, kind):
    whole = text_of("hello", 12)
    stop = whole[4:6]
    handle = client.submit("hello", greedy(stop=[stop], include_stop_str_in_output=included, output_kind=kind))
    outputs = list(handle)
    got = "".join(o.outputs[0].text for o in outputs) if kind is DELTA else outputs[-1].outputs[0].text
    assert got == whole[: 6 if included else 4]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
    n_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert (n_tokens if kind is DELTA else len(outputs[-1].outputs[0].token_ids)) == 6


def test_a_stop_string_frees_its_sequence_within_two_steps():
    client = make_client(starts=False)
    heard = []

    class Listener:
        def on_step(self, stats):
            heard.extend(stats.finished)

    client.core.set_listener(Listener())
    handle = client.submit("hello", greedy(max_tokens=50, stop=text_of("hello", 12)[3]))
    n_rounds = 0
    while client.core.step_once():
        n_rounds += 1
    assert n_rounds <= 10
    assert [ended.finish_reason for ended in heard] == ["stop"]
    assert len(last(handle).outputs[0].token_ids) == 4
    client.close()


def test_a_stop_string_is_not_looked_for_in_the_first_min_tokens(client):
    whole = text_of("hello", 12)
    output = last(client.submit("hello", greedy(stop=[whole[2], whole[8]], min_tokens=4)))
    assert output.outputs[0].text == whole[:8]
    assert output.outputs[0].stop_reason == whole[8]


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_is_counted_and_only_shown_on_request(client, included):
    tokens = tokens_of("hello", 12)
    output = last(
        client.submit("hello", greedy(stop_token_ids=[tokens[5]], include_stop_str_in_output=included))
    ).outputs[0]
    assert output.token_ids == tokens[:6]
    assert output.text == LETTERS.decode(tokens[: 6 if included else 5])
    assert output.stop_reason == tokens[5]


def test_logprobs_have_the_chosen_token_first(client):
    output = last(client.submit("hello", greedy(logprobs=2, max_tokens=3))).outputs[0]
    assert len(output.logprobs) == 3
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(position)) == token
        assert [entry.rank for entry in position.values()] == [1, 2]
        assert position[token].decoded_token == LETTERS.token_text(token)
    assert output.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert last(client.submit("hello", greedy())).outputs[0].logprobs is None


def test_prompt_logprobs_are_parallel_to_the_prompt(client):
    outputs = list(client.submit("hello", greedy(prompt_logprobs=0, output_kind=DELTA)))
    found = outputs[0].prompt_logprobs
    assert found[0] is None
    assert [list(position) for position in found[1:]] == [[i] for i in LETTERS.encode("ello")]
    assert found[1][LETTERS.encode("e")[0]].decoded_token == "e"
    assert all(o.prompt_logprobs is None for o in outputs[1:])


def test_half_a_character_has_no_text_of_its_own():
    from tiercel.engine.outputs import token_text

    assert token_text(95, [1], LETTERS) == ""
    assert token_text(96, [1, 95], LETTERS) == "é"
    assert token_text(96, [1, 2], LETTERS) == ""
    assert token_text(5, [], LETTERS) == "%"
    assert token_text(5, [], None) is None


def test_n_outputs_have_seeds_of_their_own(client):
    params = SamplingParams(n=3, seed=11, max_tokens=6, prompt_logprobs=0)
    output = last(client.submit("hello", params))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    for i, one in enumerate(output.outputs):
        assert one.token_ids == expected_tokens(LETTERS.encode("hello"), 6, params, seed=11 + i)
        assert one.finish_reason == "length"
    assert len(output.prompt_logprobs) == 5


def test_streamed_outputs_of_one_request_are_told_apart(client):
    params = SamplingParams(n=2, seed=3, max_tokens=8, output_kind=DELTA)
    got = {0: [], 1: []}
    for output in client.submit("hello", params):
        for one in output.outputs:
            got[one.index] += one.token_ids
    assert got == {i: expected_tokens(LETTERS.encode("hello"), 8, params, seed=3 + i) for i in (0, 1)}


def test_requests_without_a_seed_differ_and_repeat_with_the_engine():
    runs = []
    for _ in range(2):
        client = make_client()
        params = SamplingParams(max_tokens=8)
        runs.append([last(client.submit("hello", params)).outputs[0].token_ids for _ in range(2)])
        client.close()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_an_aborted_request_says_so():
    client = make_client(starts=False)
    handle = client.submit("hello", greedy(max_tokens=50), request_id="mine")
    for _ in range(4):
        client.core.step_once()
    client.abort("mine")
    client.abort("nobody")
    while client.core.step_once():
        pass
    output = last(handle).outputs[0]
    assert output.finish_reason == "abort"
    assert output.text == text_of("hello", len(output.token_ids))
    client.close()


def test_leaving_with_frees_the_request(client):
    with client.submit("hello", greedy(max_tokens=50)) as handle:
        next(handle)
    assert last(client.submit("hi", greedy())).finished


REFUSALS = {
    "prompt": ["", [], {"prompt": 5}, {"text": "x"}, 7, "x" * 64, "x" * 65, [97], [-1]],
    "prompt_token_ids": [{"prompt_token_ids": "abc"}, [True], [1.5], ["a"]],
}


@pytest.mark.parametrize(
    ("param", "prompt"), [(name, one) for name, many in REFUSALS.items() for one in many], ids=repr
)
def test_a_wrong_prompt_is_refused_by_name(client, param, prompt):
    with pytest.raises(RequestError) as caught:
        client.submit(prompt, greedy())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("logit_bias", {"logit_bias": {97: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [97]}),
        ("stop_token_ids", {"stop_token_ids": [97]}),
        ("min_tokens", {"min_tokens": 60, "max_tokens": 100}),
        ("bad_words", {"bad_words": [" "]}),
    ],
)
def test_a_parameter_beyond_the_model_is_refused_by_name(client, param, params):
    with pytest.raises(RequestError) as caught:
        client.submit("hello", SamplingParams(**params))
    assert caught.value.param == param


def test_the_whole_vocabulary_may_be_asked_for_where_allowed():
    client = make_client(max_logprobs=-1)
    output = last(client.submit("hello", greedy(logprobs=-1, max_tokens=1)))
    assert len(output.outputs[0].logprobs[0]) == 97
    client.close()


def test_max_tokens_ends_at_the_context(client):
    output = last(client.submit("x" * 60, greedy(max_tokens=100)))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"
    assert len(last(client.submit("x" * 60, greedy(max_tokens=None))).outputs[0].token_ids) == 4


def test_what_can_never_fit_the_pool_is_refused_with_numbers():
    client = make_client(limits=make_limits(n_pages=3))
    with pytest.raises(PromptTooLong, match=r"come to 14; at most 13 .* in 3 pages of 4"):
        client.submit("hello", greedy(max_tokens=9))
    assert len(last(client.submit("hello", greedy(max_tokens=8))).outputs[0].token_ids) == 8
    assert len(last(client.submit("hello", greedy(max_tokens=None))).outputs[0].token_ids) == 8
    client.close()


def test_priority_needs_the_policy(client):
    with pytest.raises(RequestError, match="scheduling_policy=priority") as caught:
        client.submit("hello", greedy(), priority=1)
    assert caught.value.param == "priority"


def test_without_a_tokenizer_only_ids_are_served():
    client = make_client(tokenizer=None)
    output = last(client.submit([1, 2, 3], greedy(logprobs=0)))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == expected_tokens([1, 2, 3], 12, greedy())
    assert output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].decoded_token is None
    for wrong in ("text", [1, 2]):
        with pytest.raises(RequestError, match="no tokenizer"):
            client.submit(wrong, greedy(stop="x"))
    client.close()


def test_a_request_id_in_use_is_refused_and_may_be_used_again():
    client = make_client(starts=False)
    client.submit("hello", greedy(), request_id="a")
    with pytest.raises(RequestError, match="running already"):
        client.submit("hello", greedy(), request_id="a")
    while client.core.step_once():
        pass
    client.submit("hello", greedy(), request_id="a")
    client.close()


def test_a_full_queue_refuses_and_forgets_the_request():
    client = make_client(starts=False, max_waiting=2)
    client.submit("hello", greedy())
    with pytest.raises(QueueFull):
        client.submit("hello", SamplingParams(n=2), request_id="b")
    assert "b" not in client._requests
    assert "0_b" not in client._owners
    client.close()


def test_text_that_cannot_be_made_fails_only_its_request(client):
    class Broken(LetterTokenizer):
        def decode(self, ids, *, skip_special_tokens=True):
            raise UnicodeError("broken")

    good = client.submit("hello", greedy())
    client.tokenizer = Broken()
    bad = client.submit("hello", greedy(max_tokens=50))
    with pytest.raises(RequestFailed, match="broken"):
        last(bad)
    assert last(good).outputs[0].text == text_of("hello", 12)


def test_death_reaches_every_reader():
    runner = FakeRunner(make_limits())
    client = make_client(runner=runner, starts=False)
    handles = [client.submit("hello", greedy(max_tokens=50)) for _ in range(6)]
    runner.collect = lambda: 1 / 0
    client.core.start()
    for handle in handles:
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            last(handle)
        with pytest.raises(StopIteration):
            next(handle)
    assert not client.is_alive
    with pytest.raises(EngineDead):
        client.submit("hello", greedy())
    client.close()


def test_many_prompts_come_back_with_their_numbers(client):
    prompts = [f"prompt {i}" for i in range(40)]
    got = dict(client.generate_many(prompts, greedy(max_tokens=5)))
    assert sorted(got) == list(range(40))
    assert all(got[i].outputs[0].text == text_of(prompt, 5) for i, prompt in enumerate(prompts))
    assert got[3].prompt == "prompt 3"


def test_many_prompts_may_have_many_params(client):
    got = dict(client.generate_many(["a", "b"], [greedy(max_tokens=1), greedy(max_tokens=2)]))
    assert [len(got[i].outputs[0].token_ids) for i in (0, 1)] == [1, 2]
    with pytest.raises(RequestError, match="3 for 2 prompts"):
        client.generate_many(["a", "b"], [greedy()] * 3)


def test_a_wrong_prompt_among_many_is_named_before_anything_runs(client):
    with pytest.raises(RequestError, match="prompt 1 of 3"):
        client.generate_many(["a", [], "b"], greedy())
    assert client.snapshot.n_total_steps == 0


def test_one_that_fails_among_many_does_not_take_the_others():
    client = make_client(runner=FakeRunner(make_limits(), nan_token_id=1))
    got = dict(client.generate_many(["abc", "a!c", "abd"], greedy(max_tokens=2)))
    assert isinstance(got[1], RequestFailed)
    assert got[0].finished
    assert got[2].finished
    client.close()


def test_leaving_many_early_frees_the_rest(client):
    for _ in client.generate_many([f"p{i}" for i in range(30)], greedy(max_tokens=40)):
        break
    assert last(client.submit("hello", greedy())).finished


def test_the_cache_can_be_reset(client):
    last(client.submit("hello world", greedy()))
    assert last(client.submit("hello world", greedy())).num_cached_tokens == 8
    while not client.reset_prefix_cache():
        pass
    assert last(client.submit("hello world", greedy())).num_cached_tokens == 0
    assert last(client.submit("hello world", greedy(), cache_salt="x")).num_cached_tokens == 0
    with pytest.raises(RequestError, match="cache_salt"):
        client.submit("hello", greedy(), cache_salt="")


def test_an_event_loop_streams(client):
    async def main():
        return [output async for output in client.generate("hello", greedy(output_kind=DELTA))]

    outputs = asyncio.run(main())
    assert "".join(o.outputs[0].text for o in outputs) == text_of("hello", 12)
    assert outputs[-1].finished


async def broken_off(stream):
    await stream.aclose()


async def thrown_into(stream):
    with pytest.raises(KeyError):
        await stream.athrow(KeyError())


async def cancelled(stream):
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("leave", [broken_off, thrown_into, cancelled])
def test_leaving_a_stream_frees_its_request_within_the_steps_under_way(leave):
    client = make_client(starts=False)

    async def main():
        stream = client.generate("hello", greedy(max_tokens=58))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        while not first.done():
            client.core.step_once()
            await asyncio.sleep(0)
        await leave(stream)

    asyncio.run(main())
    n_rounds = 0
    while client.core.step_once():
        n_rounds += 1
    assert n_rounds <= 4
    client.close()
    assert_empty(client)


def test_sixty_four_streams_with_random_aborts_return_every_page_and_slot(client):
    rng = random.Random(5)

    async def one(i):
        n_read = 0
        limit = rng.choice([1, 2, 5, 99])
        stream = client.generate(f"stream {i}", greedy(max_tokens=20, output_kind=DELTA))
        text = ""
        async for output in stream:
            text += output.outputs[0].text
            n_read += 1
            if n_read == limit:
                break
        await stream.aclose()
        assert text_of(f"stream {i}", 20).startswith(text)

    async def main():
        await asyncio.gather(*(one(i) for i in range(64)))

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_step_wakes_a_loop_once_however_many_it_serves():
    client = make_client(starts=False, max_num_batched_tokens=64)

    async def main():
        loop = asyncio.get_running_loop()
        n_calls = 0
        call = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal n_calls
            n_calls += 1
            return call(*args)

        loop.call_soon_threadsafe = counted

        async def read(handle):
            return [output async for output in handle]

        handles = [client.submit(f"s{i}", greedy(max_tokens=3)) for i in range(4)]
        reading = [asyncio.ensure_future(read(handle)) for handle in handles]
        await asyncio.sleep(0)
        n_rounds = 0
        while client.core.step_once():
            n_rounds += 1
            for _ in range(3):
                await asyncio.sleep(0)
        assert [len(outputs) for outputs in await asyncio.gather(*reading)] == [3] * 4
        assert n_calls == 3
        del loop.call_soon_threadsafe

    asyncio.run(main())
    client.close()


def test_a_loop_that_was_closed_under_its_readers_frees_their_requests():
    client = make_client(starts=False)
    loop = asyncio.new_event_loop()
    handle = client.submit("hello", greedy(max_tokens=50))
    waiting = loop.create_task(handle.__anext__())
    loop.call_soon(loop.stop)
    loop.run_forever()
    waiting._log_destroy_pending = False
    loop.close()
    n_rounds = 0
    while client.core.step_once():
        n_rounds += 1
    assert n_rounds < 10
    assert client._owners == {}
    client.close()
