"""A model that says a given text, so many tokens at a time, behind the real engine and server."""

import json
import time

from kit import DEADLINE_S, FakeRunner, GatedRunner, Rig, ScriptedRunner, byte_tokenizer

from tiercel.api.http.running import Running

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
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

    def _run_sequence(self, plan, s, start, n):
        row = self._row(int(plan.seq_slot[s]))
        end = start + n
        rows = []
        if plan.seq_scores[s]:
            rows = [(s, i, row.tokens[i + 1], 1) for i in range(start, end - bool(plan.seq_samples[s]))]
        if not plan.seq_samples[s]:
            return rows
        token = self._next(row.tokens[row.n_prompt : end], self.mask_of(plan, s))
        row.tokens[end] = token
        return [*rows, (s, end - 1, token, 1)]

    def _next(self, output, mask):
        """Say the text's next token, or another that may come."""
        token = self.script[len(output)] if len(output) < len(self.script) else 256
        return token if mask is None or mask[token] else int(mask.argmax())


class GatedScript(GatedRunner, Script):
    """Says its text as far as it is let."""


class Scripted:
    """One model that says one text, or the tokens it is given. Each asking has an engine of its own.

    A token of the default tokenizer is a byte, so `bytes` are tokens.
    """

    def __init__(self, text, *, template=TEMPLATE, special=(), settings=None, tokenizer=None, **options):
        self._tokenizer = tokenizer or byte_tokenizer(template, special)
        is_text = isinstance(text, str)
        self.script = self._tokenizer.encode(text, add_special_tokens=False) if is_text else list(text)
        self._settings = settings
        self._options = options

    def _rig(self, kind):
        return Rig(
            runner=lambda limits: kind(limits, script=self.script),
            tokenizer=lambda: self._tokenizer,
            limits=LIMITS,
            settings=self._settings,
            max_num_batched_tokens=1024,
            check_each_step=False,
            **self._options,
        )

    def whole(self, *, path=CHAT, **fields):
        """Ask for a whole answer."""
        rig = self._rig(Script)
        try:
            answer = rig.post(path, _body(path) | fields)
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

    def stream(self, monkeypatch, n_tokens, *, path=CHAT, **fields):
        """Ask for a stream in which `n_tokens` come at a time; give its chunks."""
        rig = self._rig(GatedScript)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Running, "outputs", lambda running: _in_steps(running, rig.runner, n_tokens))
                chunks = rig.stream(path, **_body(path) | {"ignore_eos": False} | fields)
            rig.runner.open()
            rig.assert_idle()
            return chunks
        finally:
            rig.close()


def _body(path):
    return {"max_tokens": 2000} | ({"prompt": "hi"} if path == COMPLETE else {"messages": HI})


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


def both(monkeypatch, model, **ask):
    """Ask for the whole and for streams of all steps; check that they agree; give the choice and the streams."""
    whole = model.whole(**ask)
    streams = [Streamed(model.stream(monkeypatch, n_tokens, **ask)) for n_tokens in STEPS]
    for streamed in streams:
        assert_same(streamed, whole)
    return whole["choices"][0], streams


def both_texts(monkeypatch, model, **ask):
    """Do the same with completions; give the choice and each stream's pieces of text."""
    choice = model.whole(path=COMPLETE, **ask)["choices"][0]
    streams = []
    for n_tokens in STEPS:
        chunks = [c["choices"][0] for c in model.stream(monkeypatch, n_tokens, path=COMPLETE, **ask) if c["choices"]]
        streams.append([chunk["text"] for chunk in chunks])
        assert "".join(streams[-1]) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["stop_reason"] == choice["stop_reason"]
    return choice, streams
