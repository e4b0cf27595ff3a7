"""A model that says a given text, so many tokens at a time, behind the real engine and server."""

import json
import time

from kit import DEADLINE_S, FakeRunner, GatedRunner, Rig, ScriptedRunner, byte_tokenizer

from tiercel.api.http.running import Running

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
STEPS = (1, 2, 3, None)  # tokens that come at once; None: all
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tell something.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.reasoning is defined %}[{{ m.reasoning }}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if opens %}<think>\n{% endif %}{% endif %}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LIMITS = {"vocab_size": 320, "max_len_tokens": 4096, "max_step_tokens": 2048, "max_logits_rows": 2048, "n_pages": 4096}


class Script(ScriptedRunner):
    """Says its text, and keeps no history: hundreds of steps cost little."""

    def _run(self, plan):
        return FakeRunner._run(self, plan)

    def _run_sequence(self, plan, s):
        if not plan.seq_samples[s]:
            return []
        row = self._row(int(plan.seq_slot[s]))
        position = int(plan.seq_start[s] + plan.seq_tokens[s]) - 1
        k = position + 1 - row.n_prompt
        token = self.script[k] if k < len(self.script) else 256
        row.tokens[position + 1] = token
        return [(s, position, token, 1)]


class GatedScript(GatedRunner, Script):
    """Says its text as far as it is let."""


class Scripted:
    """One model that says one text. Each asking has an engine of its own, or `close` is called between."""

    def __init__(self, text, *, template=TEMPLATE, special=(), settings=None):
        self._tokenizer = byte_tokenizer(template, special)
        self.script = self._tokenizer.encode(text, add_special_tokens=False)
        self._settings = settings

    def _rig(self, kind):
        return Rig(
            runner=lambda limits: kind(limits, script=self.script),
            tokenizer=lambda: self._tokenizer,
            limits=LIMITS,
            settings=self._settings,
            max_num_batched_tokens=1024,
            check_each_step=False,
        )

    def whole(self, **fields):
        """Ask for a whole answer."""
        rig = self._rig(Script)
        try:
            answer = rig.post(CHAT, {"messages": HI, "max_tokens": 2000} | fields)
            rig.assert_idle()
            return answer
        finally:
            rig.close()

    def refused(self, status=400, **fields):
        """Ask for what is refused; give the error."""
        rig = self._rig(Script)
        try:
            return rig.refused(CHAT, {"messages": HI, "max_tokens": 2000} | fields, status)
        finally:
            rig.close()

    def stream(self, monkeypatch, n_tokens, **fields):
        """Ask for a stream in which `n_tokens` come at a time; give its chunks."""
        rig = self._rig(GatedScript)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Running, "outputs", lambda running: _in_steps(running, rig.runner, n_tokens))
                body = {"messages": HI, "max_tokens": 2000, "ignore_eos": False} | fields
                chunks = rig.stream(CHAT, **body)
            rig.runner.open()
            rig.assert_idle()
            return chunks
        finally:
            rig.close()


async def _in_steps(running, runner, n_tokens):
    """Give a request's outputs, each of exactly `n_tokens` tokens but for the last."""
    (handle,) = running.handles
    state, n = handle._state, 0
    while not state.is_read:
        n += n_tokens or 1_000_000
        runner.let(n_tokens or 2000)
        deadline_s = time.monotonic() + DEADLINE_S
        while not state.is_ended and len(state.outputs[0].token_ids) < n:
            assert time.monotonic() < deadline_s, "the tokens did not come"
            time.sleep(0.0001)
        output = await anext(handle, None)
        if output is not None:
            yield 0, output


class Streamed:
    """A stream put together as a client does, with the rules for deltas checked."""

    def __init__(self, chunks):
        self.content = self.reasoning = ""
        self.calls = []
        self.finish_reason = None
        self.deltas = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                self.deltas.append(choice["delta"])
                self._add(choice["delta"])
                self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.usage = chunks[-1].get("usage")

    def _add(self, delta):
        assert set(delta) <= {"role", "content", "reasoning", "reasoning_content", "tool_calls"}
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(self.calls):
                assert set(part) == {"index", "id", "type", "function"}
                assert part["type"] == "function"
                assert part["function"]["name"]
                self.calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                assert part["index"] == len(self.calls) - 1  # a new call ends the one before
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                self.calls[-1]["function"]["arguments"] += part["function"]["arguments"]


def calls_of(calls):
    """Give names and arguments."""
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def assert_same(streamed, whole):
    """A stream says what the whole answer says."""
    (choice,) = whole["choices"]
    message = choice["message"]
    assert streamed.content == (message["content"] or "")
    assert streamed.reasoning == message.get("reasoning", "")
    assert calls_of(streamed.calls) == calls_of(message.get("tool_calls", []))
    assert streamed.finish_reason == choice["finish_reason"]
    assert len({call["id"] for call in streamed.calls}) == len(streamed.calls)
