"""Random traffic on a server's socket: good requests, bad ones, clients that leave, do not read, or send nonsense.

Everything is drawn from one seed. `send` gives what was answered, by kind, so that a run can be told from an idle one.
"""

import asyncio
import json
import random
from collections import Counter

CHAT, COMPLETE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# What a field may wrongly hold.
NONSENSE = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    -(2**63),
    2**63,
    2**70,
    0.5,
    1e308,
    "",
    "x",
    "\x00",
    "é\U0001f600",
    "x" * 3000,
    [],
    [None],
    [[]],
    ["x"] * 40,
    [-1, 2**40],
    {},
    {"type": "json_schema"},
    {"type": "function", "function": 5},
    {"edits": 5},
    [{"type": "text"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}],
    [{"role": "tool", "content": None}],
)
FIELDS = (
    *("model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "min_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop"),
    *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "top_logprobs", "priority"),
    *("prompt_logprobs", "echo", "truncate_prompt_tokens", "cache_salt", "request_id", "tools", "tool_choice"),
    *("response_format", "structured_outputs", "chat_template_kwargs", "documents", "reasoning_effort", "system"),
    *("stop_sequences", "thinking", "output_config", "context_management", "metadata", "input", "query", "queries"),
    *("tokens", "text_1", "text_2", "dimensions", "previous_response_id", "include", "instructions", "store"),
    *("thinking_token_budget", "continue_final_message", "add_generation_prompt", "chat_template", "user", "nonsense"),
)
GETS = ("/health", "/ready", "/version", "/load", "/metrics", "/v1/models", "/v1/models/x/y", "/openapi.json", "/")
POSTS = (
    *(CHAT, COMPLETE, MESSAGES, "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize"),
    *("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/ping", "/v1/audio/transcriptions", "/nowhere"),
)
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    b"zz\r\n",
    b"BREW /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n"
    b"content-type: application/json\r\n\r\n{}",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
)


class Traffic:
    """A run of requests. `n_tokens_max` bounds what a good one asks for."""

    def __init__(self, seed, *, n_tokens_max=12, deadline_s=60.0):
        self._random = random.Random(seed)
        self._n_tokens_max = n_tokens_max
        self._deadline_s = deadline_s
        self.statuses = Counter()  # by kind and status
        self.failures = []  # 500s and what is not HTTP, with what was sent

    async def send(self, host, port, n_requests, *, n_at_once):
        """Send all, so many at a time."""
        plans = iter([self._plan() for _ in range(n_requests)])

        async def one_after_another():
            for kind, data in plans:
                async with asyncio.timeout(self._deadline_s):
                    status = await getattr(self, f"_{kind}")(host, port, data)
                self.statuses[kind, status] += 1
                if status in (500, "nonsense"):
                    self.failures.append((kind, data[:2000]))

        await asyncio.gather(*(one_after_another() for _ in range(n_at_once)))

    def _plan(self):
        draw = self._random
        kind = draw.choices(
            ["read", "wrong", "left", "unread", "half_closed", "cut", "raw", "twice"], [30, 30, 14, 4, 6, 6, 5, 5]
        )[0]
        if kind == "raw":
            return "read", draw.choice(RAW)
        if kind == "wrong":
            return "read", self._wrong()
        if kind == "twice":
            return "read", self._good() + self._good()
        if kind == "cut":
            data = self._good()
            return kind, data[: draw.randrange(1, len(data))]
        return kind, self._good()

    def _good(self):
        draw = self._random
        if draw.random() < 0.15:
            return get(draw.choice(GETS))
        n_tokens = draw.randint(1, self._n_tokens_max)
        text = draw.choice(["hi", "Why?", "é\U0001f600" * 9, "a b c " * draw.randint(1, 20)])
        body = {"max_tokens": n_tokens, "temperature": draw.choice([0.0, 1.0])}
        path = draw.choice([CHAT, COMPLETE, MESSAGES, "/tokenize"])
        if path == COMPLETE:
            body["prompt"] = draw.choice([text, [text, "b"], [1, 2, 3]])
        elif path == "/tokenize":
            return post(path, {"prompt": text})
        else:
            body["messages"] = [{"role": "user", "content": text}]
        if draw.random() < 0.6:
            body["stream"] = True
        if path != MESSAGES:
            body["ignore_eos"] = True
            if draw.random() < 0.3:
                body |= {"n": 2, "temperature": 1.0}
            if draw.random() < 0.2:
                body["logprobs"] = True if path == CHAT else 2
        if draw.random() < 0.1:
            body["tools"] = [TOOL if path == CHAT else {"name": "f", "input_schema": {"type": "object"}}]
            if path == COMPLETE:
                del body["tools"]
        return post(path, body)

    def _wrong(self):
        draw = self._random
        path = draw.choice(POSTS)
        base = draw.choice([{"messages": HI, "max_tokens": 2}, {"prompt": "x", "max_tokens": 2}, {"input": "x"}, {}])
        body = base | {draw.choice(FIELDS): draw.choice(NONSENSE) for _ in range(draw.randint(1, 3))}
        if draw.random() < 0.1:
            return post(path, None, draw.choice([b"", b"{", b"[]", b"[" * 5000, b'{"prompt": "\xff"}', b"null"]))
        return post(path, body)

    async def _read(self, host, port, data):
        """Read all there is to say; give the status of what came first."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            return status_of(await reader.read())
        except ConnectionError:
            return "reset"
        finally:
            writer.close()

    async def _left(self, host, port, data):
        """Go away after the first bytes, or before."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            n_bytes = len(data) % 3 * 100
            return status_of(await reader.read(n_bytes)) if n_bytes else "left"
        finally:
            if len(data) % 2:
                writer.transport.abort()
            writer.close()

    async def _unread(self, host, port, data):
        """Read nothing for some time, then all of it."""
        reader, writer = await asyncio.open_connection(host, port, limit=256)
        try:
            writer.write(data)
            await writer.drain()
            writer.transport.pause_reading()
            for _ in range(200):
                await asyncio.sleep(0)
            writer.transport.resume_reading()
            return status_of(await reader.read())
        finally:
            writer.close()

    async def _half_closed(self, host, port, data):
        """Say that nothing more will be sent, and still read."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            writer.write_eof()
            return status_of(await reader.read())
        except ConnectionError:
            return "reset"
        finally:
            writer.close()

    async def _cut(self, host, port, data):
        """Send a part of a request, and close."""
        _, writer = await asyncio.open_connection(host, port)
        writer.write(data)
        await writer.drain()
        writer.close()
        return "cut"


def get(path):
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()


def post(path, body, content=None):
    content = json.dumps(body).encode() if content is None else content
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def status_of(answer):
    if not answer:
        return "nothing"
    if not answer.startswith(b"HTTP/1.1 "):
        return "nonsense"
    status = int(answer[9:12])
    # What fails after a stream began is told in it.
    return 500 if status == 200 and b'"code":500' in answer else status
