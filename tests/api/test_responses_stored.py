"""Responses that are kept, and those made in the background, over a socket with the official client."""

import concurrent.futures
import json
import threading

import httpx
import openai
import pytest
from kit import DEADLINE_S, Rig, error_of, wait_until
from live import LiveServer, http_post, read_until
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from responding import RESPONSES, TOOLS, Rebuilt, read_events
from scripted import LIMITS, MARKS, TEMPLATE, GatedScript, Script, byte_tokenizer

from tiercel.api.http.tracing import Tracer

TEXT = "A text of some length, so that it takes a while."
CALL = '<think>hm</think><tool_call>{"name": "get_time", "arguments": {"n": 1}}</tool_call>'
ASK = {"model": "tiny", "input": "hi"}


class Served:
    """A live server on a model that says a text; `rig.runner` lets it go on."""

    def __init__(self, text=TEXT, kind=GatedScript, **settings):
        tokenizer = byte_tokenizer(TEMPLATE, MARKS)
        self.script = tokenizer.encode(text, add_special_tokens=False)
        self.rig = Rig(
            runner=lambda limits: kind(limits, script=self.script),
            tokenizer=lambda: tokenizer,
            limits=LIMITS,
            settings={"port": 0, "shutdown_s": 0.0} | settings,
            max_num_batched_tokens=1024,
            check_each_step=False,
        )
        self.live = LiveServer(self.rig)
        self.clients = []
        self.store = self.rig.service.responses

    def client(self, key="k"):
        made = openai.OpenAI(base_url=f"{self.live.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)
        self.clients.append(made)
        return made.responses

    def get(self, path, **query):
        return httpx.get(f"{self.live.url}{RESPONSES}/{path}", params=query, timeout=DEADLINE_S)

    def events(self, response_id, after):
        """Read a stored stream from a number on, to its end."""
        query = {"starting_after": after} if after >= 0 else {}
        answer = self.get(response_id, stream="true", **query)
        assert answer.status_code == 200, answer.text
        return read_events(answer.text, first=after + 1)

    def close(self):
        if isinstance(self.rig.runner, GatedScript):
            self.rig.runner.open()
        for made in self.clients:
            made.close()
        self.live.close()
        self.rig.assert_idle()
        self.rig.close()


@pytest.fixture
def serve():
    made = []

    def make(*args, **settings):
        made.append(Served(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as made:
        yield made


def test_the_official_client_makes_finds_lists_and_deletes_a_response(serve):
    client = serve(kind=Script).client()
    made = client.create(**ASK, instructions="Be short.", metadata={"a": "b"})
    assert made.output_text == TEXT
    assert client.retrieve(made.id) == made
    (item,) = client.input_items.list(made.id).data
    assert item.content[0].text == "hi"
    client.delete(made.id)
    for ask in (client.retrieve, client.delete, client.cancel, client.input_items.list):
        with pytest.raises(openai.NotFoundError) as error:
            ask(made.id)
        assert error.value.param == "response_id"


def test_the_official_clients_stream_helper_gives_the_final_response(serve):
    served = serve(CALL, Script)
    client = served.client()
    with client.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    assert json.loads(final.output[1].arguments) == {"n": 1}
    assert [item.id for item in client.retrieve(final.id).output] == [item.id for item in final.output]


def test_a_conversation_goes_on_by_the_id_of_its_last_response(serve):
    client = serve(CALL, Script).client()
    first = client.create(**ASK, tools=TOOLS, instructions="Once.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "noon"}
    second = client.create(model="tiny", input=[output], tools=TOOLS, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.instructions is None
    items = client.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
    newest = client.input_items.list(second.id, limit=2)
    assert [item.id for item in newest.data] == [items[3].id, items[2].id]
    assert newest.has_more
    older = client.input_items.list(second.id, limit=2, after=newest.last_id)
    assert [item.id for item in older.data] == [items[1].id, items[0].id]
    assert not older.has_more
    # Whether an earlier response is still stored does not matter to one that goes on with a later one.
    client.delete(first.id)
    third = client.create(model="tiny", input="And?", previous_response_id=second.id)
    assert len(client.input_items.list(third.id).data) == 7


def test_items_may_be_sent_back_as_they_came_or_by_reference(serve):
    client = serve(CALL, Script).client()
    first = client.create(**ASK, tools=TOOLS)
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "noon"}
    whole = [{"role": "user", "content": "hi"}, *first.output, output]
    named = [{"role": "user", "content": "hi"}, *({"type": "item_reference", "id": i.id} for i in first.output), output]
    tokens = {client.create(model="tiny", input=ask, tools=TOOLS).usage.input_tokens for ask in (whole, named)}
    assert len(tokens) == 1
    with pytest.raises(openai.BadRequestError) as error:
        client.create(model="tiny", input=[{"type": "item_reference", "id": "msg_none"}])
    assert error.value.param == "input[0].id"


def test_what_is_not_to_be_stored_is_not(serve):
    client = serve(kind=Script).client()
    for stream in (False, True):
        made = client.create(**ASK, store=False, stream=stream)
        made = list(made)[-1].response if stream else made
        assert not made.store
        with pytest.raises(openai.NotFoundError):
            client.retrieve(made.id)


def test_a_server_that_keeps_none_says_so_and_refuses_what_needs_a_store(serve):
    client = serve(kind=Script, n_stored_max=0).client()
    made = client.create(**ASK)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.create(**ASK, previous_response_id=made.id)
    for name in ("store", "background"):
        with pytest.raises(openai.BadRequestError) as error:
            client.create(**ASK, **{name: True})
        assert error.value.param == name


def test_an_unknown_previous_response_is_not_found(serve):
    with pytest.raises(openai.NotFoundError) as error:
        serve(kind=Script).client().create(**ASK, previous_response_id="resp_none")
    assert error.value.param == "previous_response_id"


def test_a_response_is_found_only_with_the_key_that_made_it(serve):
    served = serve(kind=Script, api_keys=("one", "two"))
    mine, other = served.client("one"), served.client("two")
    made = mine.create(**ASK)
    background = mine.create(**ASK, background=True)
    for ask in (
        other.retrieve,
        other.cancel,
        other.delete,
        other.input_items.list,
        lambda i: other.retrieve(i, stream=True),
        lambda i: other.create(**ASK, previous_response_id=i),
    ):
        for one in (made, background):
            with pytest.raises(openai.NotFoundError) as error:
                ask(one.id)
            unknown = str(error.value).replace(one.id, "resp_none")
            with pytest.raises(openai.NotFoundError) as error:
                ask("resp_none")
            assert str(error.value) == unknown
    with pytest.raises(openai.BadRequestError):
        other.create(model="tiny", input=[{"type": "item_reference", "id": made.output[0].id}])
    assert mine.retrieve(made.id) == made
    wait_until(lambda: mine.retrieve(background.id).status == "completed")


def test_a_response_in_the_background_is_answered_at_once_and_goes_on(serve):
    served = serve()
    client = served.client()
    made = client.create(**ASK, background=True)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    wait_until(lambda: served.rig.service.n_open == 1)  # the gate still counts the request whose answer was just sent
    with pytest.raises(openai.BadRequestError) as error:
        client.create(**ASK, previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    served.rig.runner.let(5)
    assert client.retrieve(made.id).status == "in_progress"
    served.rig.runner.open()
    wait_until(lambda: client.retrieve(made.id).status == "completed")
    done = client.retrieve(made.id)
    assert done.output_text == TEXT
    assert done.usage.output_tokens == len(served.script) + 1
    wait_until(lambda: served.rig.service.n_open == 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_background_stream_is_read_again_from_any_number(serve, is_streamed):
    served = serve(CALL, Script)
    client = served.client()
    if is_streamed:
        response_id = list(client.create(**ASK, tools=TOOLS, background=True, stream=True))[-1].response.id
    else:
        response_id = client.create(**ASK, tools=TOOLS, background=True).id
    every = served.events(response_id, -1)
    Rebuilt(every)
    assert every[-1]["response"] == served.get(response_id).json()
    for after in range(len(every)):
        assert served.events(response_id, after) == every[after + 1 :]
    assert served.events(response_id, 10**9) == []
    through_client = [event.sequence_number for event in client.retrieve(response_id, stream=True, starting_after=3)]
    assert through_client == list(range(4, len(every)))


def test_two_readers_of_one_stream_get_the_same_events_while_it_runs(serve, pool):
    served = serve()
    made = served.client().create(**ASK, background=True)
    readers = [pool.submit(served.events, made.id, after) for after in (-1, 1, 4)]
    (record,) = served.store._records.values()
    wait_until(lambda: record.log.n_readers == 3)
    for _ in range(4):
        served.rig.runner.let(3)
        wait_until(lambda: served.rig.runner._steps._value == 0)
    served.rig.runner.open()
    whole, some, fewer = (reader.result(DEADLINE_S) for reader in readers)
    Rebuilt(whole)
    assert whole[2:] == some
    assert whole[5:] == fewer


def test_a_background_stream_goes_on_when_its_reader_leaves(serve):
    served = serve()
    client = served.client()
    stream = client.create(**ASK, background=True, stream=True)
    response_id = next(stream).response.id
    served.rig.runner.let(3)
    stream.close()
    (record,) = served.store._records.values()
    wait_until(lambda: record.log.n_readers == 0)
    served.rig.runner.open()
    assert Rebuilt(served.events(response_id, -1)).last["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_foreground_response_ends_with_its_client_and_is_not_stored(serve, stream):
    served = serve()
    body = json.dumps(ASK | {"stream": stream}).encode()
    with served.live.connection() as raw:
        raw.sendall(http_post(RESPONSES, body))
        wait_until(lambda: len(served.rig.service._running) == 1)
        if stream:
            read_until(raw, b"response.in_progress")
    wait_until(lambda: served.rig.service.n_open == 0)
    served.rig.runner.let(2)
    wait_until(lambda: served.rig.snapshot_is_idle)
    assert len(served.store) == 0


def test_a_cancelled_response_keeps_what_there_is_and_is_freed_at_once(serve, pool):
    served = serve()
    client = served.client()
    made = client.create(**ASK, background=True)
    reader = pool.submit(served.events, made.id, -1)
    served.rig.runner.let(6)
    (record,) = served.store._records.values()
    wait_until(lambda: record.answer.n_tokens >= 3)
    asked = pool.submit(client.cancel, made.id)
    wait_until(lambda: record.answer.is_cancel_wanted)
    served.rig.runner.let(2)
    cancelled = asked.result(DEADLINE_S)
    assert cancelled.status == "cancelled"
    assert TEXT.startswith(cancelled.output_text)
    assert len(cancelled.output_text) >= 3
    assert cancelled.output[0].status == "incomplete"
    events = reader.result(DEADLINE_S)
    assert events[-1]["type"] == "response.cancelled"
    assert Rebuilt(events).last == served.get(made.id).json()
    wait_until(lambda: served.rig.snapshot_is_idle)
    assert client.cancel(made.id) == cancelled
    assert client.retrieve(made.id) == cancelled


def test_cancelling_what_has_ended_changes_nothing(serve):
    served = serve(kind=Script)
    client = served.client()
    made = client.create(**ASK, background=True)
    wait_until(lambda: client.retrieve(made.id).status == "completed")
    assert client.cancel(made.id).status == "completed"
    foreground = client.create(**ASK)
    with pytest.raises(openai.BadRequestError) as error:
        client.cancel(foreground.id)
    assert error.value.param == "response_id"


def test_cancels_that_race_with_the_end_give_one_final_state(serve, pool):
    served = serve("abc", Script)
    client = served.client()
    for _ in range(20):
        made = client.create(**ASK, background=True)
        answers = list(pool.map(client.cancel, [made.id] * 3))
        assert answers[0] == answers[1] == answers[2]
        assert answers[0].status in ("cancelled", "completed")
        assert client.retrieve(made.id) == answers[0]
        assert served.events(made.id, -1)[-1]["type"] == f"response.{answers[0].status}"


def test_deleting_what_runs_stops_it_and_ends_its_readers(serve, pool):
    served = serve()
    client = served.client()
    made = client.create(**ASK, background=True)
    reader = pool.submit(served.events, made.id, -1)
    (record,) = served.store._records.values()
    wait_until(lambda: record.log.n_readers == 1)
    client.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(made.id)
    served.rig.runner.let(3)
    assert reader.result(DEADLINE_S)[-1]["type"] == "response.cancelled"
    wait_until(lambda: served.rig.snapshot_is_idle)


def test_the_oldest_go_first_and_what_runs_stays(serve):
    served = serve("abc", n_stored_max=3)
    client = served.client()
    runs = client.create(**ASK, background=True)
    served.rig.service.responses.check()
    done = []
    for _ in range(4):
        stored = client.create(**ASK, background=True)
        served.rig.runner.let(1)
        client.delete(stored.id)
        done.append(stored.id)
    served.rig.runner.open()
    wait_until(lambda: client.retrieve(runs.id).status == "completed")
    ids = [client.create(**ASK).id for _ in range(3)]
    for gone in (runs.id, *done):
        assert error_of(served.get(gone).json(), 404)["param"] == "response_id"
        assert served.get(gone, stream="true", starting_after=2).status_code == 404
    assert all(client.retrieve(one).output_text == "abc" for one in ids)


def test_a_response_in_the_background_is_one_span_told_at_its_end(serve):
    served = serve()
    spans = InMemorySpanExporter()
    tracer = served.rig.service.tracer = Tracer(spans, "tiny")
    client = served.client()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    made = client.create(**ASK, background=True, extra_headers={"traceparent": parent})
    assert client.retrieve(made.id).status == "in_progress"
    tracer._provider.force_flush()
    assert spans.get_finished_spans() == ()
    served.rig.runner.open()
    wait_until(lambda: served.rig.service.n_open == 0)
    tracer._provider.force_flush()
    (span,) = spans.get_finished_spans()
    assert span.attributes["gen_ai.usage.completion_tokens"] == len(served.script) + 1
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]


def test_more_in_the_background_than_may_be_are_told_to_come_back(serve):
    served = serve(n_background_max=2)
    client = served.client()
    for _ in range(2):
        client.create(**ASK, background=True)
    with pytest.raises(openai.RateLimitError) as error:
        client.create(**ASK, background=True)
    assert error.value.response.headers["retry-after"] == "1"
    served.rig.runner.open()
    wait_until(lambda: served.rig.service.n_open == 0)
    assert client.create(**ASK, background=True).status == "in_progress"


def test_responses_in_the_background_count_among_the_requests_under_way(serve):
    served = serve(n_open_max=1)
    client = served.client()
    client.create(**ASK, background=True)
    with pytest.raises(openai.RateLimitError):
        client.create(**ASK)


def test_events_beyond_the_logs_bound_are_told_as_gone(serve):
    served = serve("x" * 200, Script, event_log_bytes_max=2000)
    client = served.client()
    made = client.create(**ASK, background=True)
    wait_until(lambda: client.retrieve(made.id).status == "completed")
    (record,) = served.store._records.values()
    first = record.log.first
    assert first > 0
    error = error_of(served.get(made.id, stream="true", starting_after=0).json(), 400)
    assert error["param"] == "starting_after"
    assert served.events(made.id, first - 1)[-1]["type"] == "response.completed"
    assert client.retrieve(made.id).output_text == "x" * 200


def test_a_drain_stops_what_nobody_reads_and_lets_the_others_end(serve, pool):
    served = serve()
    client = served.client()
    unread = client.create(**ASK, background=True)
    read = client.create(**ASK, background=True)
    reader = pool.submit(served.events, read.id, -1)
    records = served.store._records
    wait_until(lambda: records[read.id].log.n_readers == 1)
    served.rig.service.begin_drain()
    with pytest.raises(openai.InternalServerError) as error:
        client.create(**ASK, background=True)
    assert error.value.status_code == 503
    served.rig.runner.open()
    assert Rebuilt(reader.result(DEADLINE_S)).last["status"] == "completed"
    wait_until(lambda: records[unread.id].running is None)
    assert client.retrieve(unread.id).status == "failed"
    assert "shutting down" in client.retrieve(unread.id).error.message


def test_the_end_of_a_drain_ends_streams_as_failed(serve, pool):
    served = serve()
    client = served.client()
    made = client.create(**ASK, background=True)
    reader = pool.submit(served.events, made.id, -1)
    foreground = pool.submit(lambda: list(client.create(**ASK, stream=True)))
    wait_until(lambda: len(served.rig.service._running) == 2)
    wait_until(lambda: served.store._records[made.id].log.n_readers == 1)
    served.rig.service.begin_drain()
    served.rig.service.abort_all()
    served.rig.runner.open()
    assert Rebuilt(reader.result(DEADLINE_S)).last["status"] == "failed"
    assert foreground.result(DEADLINE_S)[-1].response.status == "failed"


def test_the_end_of_the_server_frees_what_still_runs():
    served = Served()
    served.client().create(**ASK, background=True)
    service, (record,) = served.rig.service, served.store._records.values()
    served.live.close()
    served.rig.runner.let(3)
    wait_until(lambda: served.rig.snapshot_is_idle)
    assert record.answer.status == "failed"
    assert record.log.is_ended
    service.check()
    served.close()


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"stream": "yes"}, "stream"),
        ("", {"starting_after": "1"}, "starting_after"),
        ("", {"stream": "true", "starting_after": "-1"}, "starting_after"),
        ("", {"stream": "true", "starting_after": "x"}, "starting_after"),
        ("", {"stream": "true", "starting_after": "9" * 40}, "starting_after"),
        ("", {"include_obfuscation": "true"}, "include_obfuscation"),
        ("", {"include": "reasoning.encrypted_content"}, "include[0]"),
        ("", {"include[]": "all"}, "include[0]"),
        ("", {"other": "1"}, "other"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"limit": "101"}, "limit"),
        ("/input_items", {"limit": "x"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "msg_none"}, "after"),
    ],
)
def test_wrong_queries_are_refused_by_their_parameter(shared_served, path, query, param):
    answer = shared_served.get(f"{shared_served.response_id}{path}", **query)
    assert error_of(answer.json(), 400)["param"] == param


def test_only_a_response_of_the_background_has_a_stream_to_read_again(shared_served):
    foreground = shared_served.client().create(**ASK)
    assert error_of(shared_served.get(foreground.id, stream="true").json(), 400)["param"] == "stream"


@pytest.fixture(scope="module")
def shared_served():
    served = Served("abc", Script)
    served.response_id = served.client().create(**ASK, background=True).id
    yield served
    served.close()


def test_many_clients_and_readers_at_once_leave_nothing_behind(serve, pool):
    served = serve("A few words.", Script, n_stored_max=5)
    failures = []

    def visit(i):
        client = served.client()
        try:
            made = client.create(**ASK, background=True, stream=i % 2 == 0)
            if i % 2 == 0:
                assert [event.type for event in made][-1] == "response.completed"
            elif i % 3 == 0:
                client.cancel(made.id)
            else:
                client.delete(made.id)
        except openai.NotFoundError:
            pass  # gone by the others' coming
        except Exception as error:  # noqa: BLE001  told by the test's thread
            failures.append(error)

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(24)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(DEADLINE_S)
    assert failures == []
    wait_until(lambda: served.rig.service.n_open == 0)
    served.store.check()
    assert len(served.store) <= 5
