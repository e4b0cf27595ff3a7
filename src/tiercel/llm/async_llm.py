"""`AsyncLLM`: streams from an engine on an event loop, under vLLM's names. Closing it, or leaving its `with`, frees
everything.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

from tiercel.base.config import engine_options
from tiercel.boot.engine import build_engine, log_plan
from tiercel.engine.prompts import Prompt
from tiercel.protocol.outputs import RequestOutput
from tiercel.protocol.params import SamplingParams
from tiercel.sampling.defaults import default_params
from tiercel.text.conversation import Message
from tiercel.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model in this process, for use on event loops. Building one blocks while the model loads.

    Options and errors are those of `tiercel.llm.llm.LLM`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._engine = build_engine(engine_options(model=model, **options), on_plan=log_plan)
        self._engine.conversations.warm()
        weakref.finalize(self, self._engine.close)  # as `LLM` does
        self._conversations = self._engine.conversations
        self.client = self._engine.client

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None without one."""
        return self._engine.tokenizer

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self.client.is_alive

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they come; `sampling_params.output_kind` says whether each is whole or only what
        is new.

        Leaving the generator, or cancelling the task that reads it, frees the request within a step.
        """
        params = sampling_params or default_params(self._engine.plan.generation_defaults)
        stream = self.client.generate(prompt, params, request_id, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation. `template` are the keywords of `Conversations.prompt`."""
        prompt = await asyncio.to_thread(self._conversations.prompt, messages, **template)
        async for output in self.generate(prompt, sampling_params, request_id):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output that says "abort". Unknown ids are no error."""
        self.client.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached pages; False, and nothing is forgotten, while anything runs."""
        return await asyncio.to_thread(self.client.reset_prefix_cache)

    def shutdown(self) -> None:
        """As `close`, by vLLM's name."""
        self.close()

    def close(self) -> None:
        """End the engine and free what it holds. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
