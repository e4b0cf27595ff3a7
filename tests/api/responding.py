"""Asking a scripted model for responses, and reading events as the official client's types have them."""

import json

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted import GatedScript, Script, Scripted, _in_steps

from tiercel.api.http.running import Running

RESPONSES = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": "Tell something.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        "strict": False,
    }
    for name in ("get_weather", "get_time")
]
LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
LOGPROBS = ["message.output_text.logprobs"]
# What differs from one making of a response to the next.
_IDS = ("id", "call_id", "created_at", "completed_at")


class Responder(Scripted):
    """One model that says one text, asked for responses."""

    def whole(self, **fields):
        rig = self._rig(Script)
        try:
            answer = rig.post(RESPONSES, {"input": "hi", "max_output_tokens": 2000} | fields)
            Response.model_validate(answer)
            rig.assert_idle()
            return answer
        finally:
            rig.close()

    def refused(self, status=400, **fields):
        rig = self._rig(Script)
        try:
            return rig.refused(RESPONSES, {"input": "hi"} | fields, status)
        finally:
            rig.close()

    def stream(self, monkeypatch, n_tokens, **fields):
        """Ask for a stream in which `n_tokens` come at a time; give its events."""
        rig = self._rig(GatedScript)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Running, "outputs", lambda running: _in_steps(running, rig.runner, n_tokens))
                body = {"input": "hi", "max_output_tokens": 2000, "stream": True} | fields
                response = rig.ask("POST", RESPONSES, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            rig.runner.open()
            rig.assert_idle()
            return read_events(response.text)
        finally:
            rig.close()


def read_events(text, first=0):
    """Check framing, numbers and types of a stream; give its events."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == first + len(events)
        if event["type"] != "response.cancelled":  # the client's types have none
            EVENT.validate_python(event)
        events.append(event)
    return events


class Rebuilt:
    """A response put together from events alone, as a client would, with their order checked."""

    def __init__(self, events):
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in LAST
        assert not set(kinds[2:-1]) & {*LAST, *kinds[:2]}
        self.last = events[-1]["response"]
        self.items = []
        self._open = None
        self._logprobs = []
        for event in events[2:-1]:
            self._take(event["type"].removeprefix("response."), event)
        assert self._open is None
        assert self.items == self.last["output"]

    def _take(self, kind, event):
        assert event["output_index"] == len(self.items)
        if kind == "output_item.added":
            assert self._open is None
            self._open, self._text, self._part, self._logprobs = event["item"], "", None, []
            assert self._open["status"] == "in_progress"
            return
        assert event.get("item_id", self._open["id"]) == self._open["id"]
        assert event.get("content_index", 0) == 0
        if kind == "content_part.added":
            assert self._part is None
            self._part = event["part"]
            assert self._part["text"] == ""
        elif kind.endswith(".delta"):
            assert event["delta"]
            self._text += event["delta"]
            self._logprobs += event.get("logprobs", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == self._text
            self._part = event["part"]
        elif kind == "output_item.done":
            item = event["item"]
            assert item["id"] == self._open["id"]
            assert item["status"] in ("completed", "incomplete")
            if item["type"] == "function_call":
                assert item["arguments"] == self._text
            else:
                assert item["content"] == [self._part]
            self.items.append(item)
            self._open = None
        else:
            assert kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done")
            assert event.get("text", event.get("arguments")) == self._text
            assert event.get("logprobs", []) == self._logprobs


def plain(value):
    """Leave out what differs from one making to the next."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in _IDS}
    return [plain(one) for one in value] if isinstance(value, list) else value


def texts_of(response):
    """Give each item's kind and what it says."""
    done = []
    for item in response["output"]:
        if item["type"] == "function_call":
            done.append((item["name"], item["arguments"]))
        else:
            done.append((item["type"], "".join(part["text"] for part in item["content"])))
    return done
