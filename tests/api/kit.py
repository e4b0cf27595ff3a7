"""What the server's tests share: an engine on a fake runner behind a tiny byte-level tokenizer, and ways to ask it."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np

from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.engine.client import EngineClient
from tiercel.engine.config import EngineConfig
from tiercel.engine.core import EngineCore
from tiercel.testing.fake_runner import FakeRunner, make_limits
from tiercel.text.thinking_budget import ReasoningConfig
from tiercel.text.tokenizer import Tokenizer

DEADLINE_S = 10.0
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if shout %}{{ shout | upper }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 264  # as models pad theirs: more logits than tokens


def byte_tokenizer(template=TEMPLATE, more_special=(), *, add_bos=False):
    """256 tokens of one byte each, and three special ones or more."""
    letters, n = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    special = (*SPECIAL, *more_special)
    tokens = [*letters, *special]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * len(special), np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_gguf(metadata)


class GatedRunner(FakeRunner):
    """Runs as many steps as it is let; `open` lets it run freely."""

    def __init__(self, limits, **options):
        super().__init__(limits, **options)
        self._steps = threading.Semaphore(0)
        self._is_open = threading.Event()

    def let(self, n_steps):
        for _ in range(n_steps):
            self._steps.release()

    def open(self):
        self._is_open.set()
        self._steps.release()

    def collect(self):
        if not self._is_open.is_set():
            assert self._steps.acquire(timeout=2 * DEADLINE_S), "nobody let the step run"
        return super().collect()


class ScriptedRunner(FakeRunner):
    """Samples the tokens of a text, one after another, whatever the prompt, and then its end."""

    def __init__(self, limits, script):
        super().__init__(limits)
        self.script = script

    def _run(self, plan):
        result = super()._run(plan)
        for r in range(len(result.row_seq)):
            s = int(result.row_seq[r])
            row = self._row(int(plan.seq_slot[s]))
            position = int(result.row_pos[r])
            if plan.seq_samples[s] and position == plan.seq_start[s] + plan.seq_tokens[s] - 1:
                k = position + 1 - row.n_prompt
                token = self.script[k] if k < len(self.script) else 256
                result.row_token[r] = token
                row.tokens[position + 1] = token
        return result


class Rig:
    """One served engine, asked in this process."""

    def __init__(
        self,
        *,
        runner=None,
        tokenizer=byte_tokenizer,
        limits=None,
        settings=None,
        defaults=None,
        eos_ids=(256,),
        reasoning_config=None,
        **config,
    ):
        limits = make_limits(
            **(
                {"n_slots": 8, "max_len_tokens": 256, "max_step_tokens": 128, "max_logits_rows": 128, "n_pages": 512}
                | {"vocab_size": VOCAB_SIZE}
                | (limits or {})
            )
        )
        self.runner = runner(limits) if runner is not None else FakeRunner(limits)
        config = {"max_num_seqs": limits.n_slots, "max_num_batched_tokens": 64, "check_each_step": True} | config
        self.core = EngineCore(self.runner, EngineConfig(**config))
        self.tokenizer = tokenizer() if tokenizer is not None else None
        self.client = EngineClient(
            self.core,
            self.tokenizer,
            weights_digest="fake",
            kv_dtype="float16",
            eos_ids=eos_ids,
            reasoning=ReasoningConfig.from_options(reasoning_config or {}),
        )
        self.core.start()
        self.facade = EngineFacade(
            client=self.client,
            tokenizer=self.tokenizer,
            fingerprint="f00d",
            generation_defaults=defaults or {},
            cache_facts={"cache_dtype": "float16"},
            close=self.client.close,
        )
        self.settings = ServerSettings(**({"served_names": ("tiny", "also/tiny")} | (settings or {})))
        self.app = make_app(self.facade, self.settings)
        self.service = self.app.service

    def ask(self, method, path, *, headers=None, content=None, **options):
        """Send one request and return the response."""

        async def once():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
                return await client.request(method, path, headers=headers, content=content, **options)

        return asyncio.run(once())

    def post(self, path, body=None, status=200, **options):
        """Post JSON, expect a status, and return the answer's JSON."""
        options = {"json": body} | options if body is not None else options
        response = self.ask("POST", path, **options)
        assert response.status_code == status, response.text
        return response.json()

    def chat(self, status=200, **fields):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3, "ignore_eos": True}
        return self.post("/v1/chat/completions", body | fields, status)

    def complete(self, status=200, **fields):
        body = {"prompt": "hello", "max_tokens": 8, "seed": 3, "ignore_eos": True}
        return self.post("/v1/completions", body | fields, status)

    def stream(self, path, **fields):
        """Post with stream true; return the chunks, having checked the frames."""
        response = self.ask("POST", path, json={"stream": True, "seed": 3, "ignore_eos": True} | fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_frames(response.text)

    def refused(self, path, body, status=400, **options):
        """Post what is refused; return the error."""
        return error_of(self.post(path, body, status, **options), status)

    def assert_idle(self):
        """Every page, slot and request comes back, soon."""
        wait_until(lambda: self.snapshot_is_idle)
        wait_until(lambda: self.service.n_open == 0)
        self.service.check()
        assert not self.client._requests
        assert not self.client._owners

    @property
    def snapshot_is_idle(self):
        now = self.core.snapshot
        return not (now.n_running or now.n_waiting or now.n_pages_used or self.client._owners or self.service.n_open)

    def close(self):
        if isinstance(self.runner, GatedRunner):
            self.runner.open()
        self.service.close()
        self.client.close()


def wait_until(is_so):
    """Look again and again until it is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to be in time"
        time.sleep(0.002)


def read_frames(text):
    """Check the framing of a stream and return its JSON chunks."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(one.startswith("data: {") for one in frames)
    return [json.loads(one.removeprefix("data: ")) for one in frames]


def error_of(answer, status):
    """Check the one shape of errors and return what is in it."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error["message"], str)
    assert "0x" not in error["message"]
    assert "/work/" not in error["message"]
    return error
