"""/v1/completions: texts or token ids to their continuations, whole or streamed.

Each prompt is an engine request of its own, with `n` choices; a choice's index is prompt_idx * n + its index there.
`echo` puts the prompt, and its log-probabilities, before the answer; with it, `max_tokens` 0 only scores the prompt.
"""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http import logprobs
from tiercel.api.http.answer import Envelope, Tally, envelope, has_usage, request_id_of, request_metrics, writes_ids
from tiercel.api.http.beams import beams_of
from tiercel.api.http.chat import priority_of
from tiercel.api.http.params import check_stream, completion_params
from tiercel.api.http.prompts import check_prompt_logprobs, cut, encode
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.schema import CompletionRequest
from tiercel.api.http.service import Service, Submission
from tiercel.api.http.sse import EventStream
from tiercel.api.http.structured import may_have_form
from tiercel.base.errors import RequestError

if TYPE_CHECKING:
    from tiercel.protocol.outputs import CompletionOutput, RequestOutput

Prompts = list[str] | list[list[int]]


async def completions(request: Request, service: Service) -> Response:
    """Serve one completion request."""
    ask = await read(request, service, CompletionRequest)
    service.check_model(ask.model)
    check_stream(ask)
    request_id = request_id_of(request, ask)
    around = envelope(service, request_id, ask, "text_completion")
    start = service.start(
        lambda: prepare_completion(service, ask, request),
        around.id,
        is_stream=bool(ask.stream),
        has_form=may_have_form(ask),
    )
    submissions, running = await until_gone(request.receive, start, on_unwanted=close_started)
    answer = _CompletionAnswer(service, ask, submissions, around)
    if ask.stream:
        return EventStream(
            answer.frames(running),
            on_close=lambda: answer.end(running),
            write_stall_s=service.settings.write_stall_s,
            request_id=request_id,
        )
    try:
        return json_response(await until_gone(request.receive, answer.whole(running)))
    finally:
        answer.end(running)


def read_prompts(prompt: Any, n_max: int) -> Prompts:
    """Tell the four shapes of `prompt` apart: a text, texts, token ids, lists of token ids.

    Raises: RequestError: it is none of these, empty, or too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        shown = "none" if prompt is None else "an empty list" if prompt == [] else type(prompt).__name__
        raise _refused_prompt(shown)
    kinds = {type(one) for one in prompt}
    if kinds == {int}:
        return [prompt]
    if len(prompt) > n_max:
        raise RequestError(f"prompt: got {len(prompt)} prompts; at most {n_max} are taken; send fewer", param="prompt")
    if kinds == {str}:
        return prompt
    if kinds == {list}:
        if all(all(type(i) is int for i in ids) for ids in prompt):
            return prompt
        raise _refused_prompt("a list of other things than token ids")
    raise _refused_prompt(f"a list with a {sorted(kind.__name__ for kind in kinds)[0]}")


def _refused_prompt(got: str) -> RequestError:
    return RequestError(
        f"prompt: got {got}; a text, a list of texts, a list of token ids, or a list of such lists is needed",
        param="prompt",
    )


def prepare_completion(
    service: Service, ask: CompletionRequest, request: Request
) -> tuple[list[Submission], list[Submission]]:
    """Check and cut the prompts. Runs on a thread of the server."""
    service.check_generates()
    prompts = read_prompts(ask.prompt, service.settings.n_prompts_max)
    max_model_len = service.engine.max_model_len
    params = completion_params(ask, service.defaults, service.settings, max_model_len)
    n_most = service.engine.client.core.config.max_waiting
    n = ask.n or 1
    if len(prompts) * n > n_most:
        raise RequestError(
            f"n: {len(prompts)} prompts with {n} answers each; at most {n_most} answers can wait; send fewer",
            param="n",
        )
    priority = priority_of(request, ask.priority)
    special = ask.add_special_tokens is not False
    is_cut_later = ask.truncate_prompt_tokens is not None
    beams = beams_of(ask, params)
    submissions = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = encode(service, prompt, add_special_tokens=special, is_cut_later=is_cut_later)
            kept = cut(ask, ids, params.max_tokens, max_model_len)
            text: str | None = prompt if len(kept) == len(ids) else None
        else:
            kept, text = cut(ask, prompt, params.max_tokens, max_model_len), None
        submissions.append(
            Submission(
                text=text, token_ids=kept, params=params, priority=priority, cache_salt=ask.cache_salt, beams=beams
            )
        )
    check_prompt_logprobs(service, params, sum(len(one.token_ids) for one in submissions))
    return submissions, submissions


class _CompletionAnswer:
    """Makes one answer, whole or in frames, and keeps count."""

    def __init__(
        self, service: Service, ask: CompletionRequest, submissions: list[Submission], around: Envelope
    ) -> None:
        self._service = service
        self._ask = ask
        self._submissions = submissions
        self._around = around
        self._n = ask.n or 1
        self._is_scoring = ask.max_tokens == 0
        tokenizer = service.engine.tokenizer
        self._texts = logprobs.TokenTexts(tokenizer, as_ids=writes_ids(ask, service.settings))
        hides = tokenizer is not None and ask.skip_special_tokens is not False
        hidden = tokenizer.special_ids if tokenizer is not None and hides else frozenset()
        n_choices = len(submissions) * self._n
        self._entries = [logprobs.CompletionLogprobs(self._texts, hidden) for _ in range(n_choices)]
        self._has_begun = [False] * n_choices
        self._prompt_entries: dict[int, Any] = {}
        self._tally = Tally(sum(len(one.token_ids) for one in submissions))
        self._has_usage, self._has_running_usage = has_usage(ask, service.settings)

    def end(self, running: Running) -> None:
        """Free the engine's requests and note their size."""
        running.close()
        most = max(self._tally.n_by_choice.values(), default=0)
        for _ in self._submissions:
            self._service.metrics.note_request(self._n, most)

    async def whole(self, running: Running) -> dict[str, Any]:
        """Wait for the end of all; give the whole answer."""
        lasts: dict[int, RequestOutput] = {}
        async for i, output in running.outputs():
            lasts[i] = output
        choices = []
        for i in range(len(self._submissions)):
            output = lasts[i]
            self._note(i, output)
            choices += [self._choice(i, output, one) for one in output.outputs]
        metrics = request_metrics(self._service.settings, running)
        return self._around.around(choices, usage=self._tally.usage(), metrics=metrics)

    def _note(self, i: int, output: "RequestOutput") -> None:
        """Count an output; without an answer, forget the one token that the engine had to make."""
        if self._is_scoring:
            for one in output.outputs:
                one.text, one.token_ids, one.stop_reason = "", [], None
                one.logprobs = None if one.logprobs is None else []
                one.finish_reason = one.finish_reason and ("abort" if one.finish_reason == "abort" else "length")
        self._tally.add(i, output, self._n)
        if output.prompt_logprobs is not None:
            self._prompt_entries[i] = output.prompt_logprobs

    def _choice(self, i: int, output: "RequestOutput", one: "CompletionOutput") -> dict[str, Any]:
        index = i * self._n + one.index
        entries = self._entries[index]
        before = self._echoed_entries(i, index) if self._ask.echo else None
        choice = {
            "index": index,
            "text": (self._prompt_text(i) if self._ask.echo else "") + one.text,
            "logprobs": logprobs.joined(before, None if one.logprobs is None else entries.output(one.logprobs)),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._ask.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt_logprobs(output.prompt_logprobs, self._texts)
        if self._ask.return_token_ids:
            choice["token_ids"] = one.token_ids
            choice["prompt_token_ids"] = self._submissions[i].token_ids
        return choice

    def _prompt_text(self, i: int) -> str:
        one = self._submissions[i]
        if one.text is not None:
            return one.text
        tokenizer = self._service.engine.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(one.token_ids, skip_special_tokens=self._ask.skip_special_tokens is not False)

    def _echoed_entries(self, i: int, index: int) -> dict[str, Any] | None:
        positions = self._prompt_entries.get(i)
        if self._ask.logprobs is None or positions is None:
            return None
        return self._entries[index].prompt(self._prompt_text(i), self._submissions[i].token_ids, positions)

    async def frames(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Give the answer's frames as they come, several at once when several are ready."""
        async for i, output in running.outputs():
            self._note(i, output)
            ready = [piece for one in output.outputs for piece in self._of_output(i, one)]
            if ready:
                yield b"".join(ready)
        if self._has_usage:
            metrics = request_metrics(self._service.settings, running)
            yield self._around.frame([], usage=self._tally.usage(), metrics=metrics)

    def _of_output(self, i: int, one: "CompletionOutput") -> list[bytes]:
        index = i * self._n + one.index
        ready = []
        if not self._has_begun[index]:
            self._has_begun[index] = True
            ready += self._beginning(i, index)
        token_ids = one.token_ids if self._ask.return_token_ids else None
        if one.text or one.logprobs or token_ids:
            entries = None if one.logprobs is None else self._entries[index].output(one.logprobs)
            ready.append(self._chunk(index, one.text, entries, token_ids=token_ids))
        if one.finish_reason is not None:
            ready.append(self._chunk(index, "", None, one.finish_reason, stop_reason=one.stop_reason))
        return ready

    def _beginning(self, i: int, index: int) -> list[bytes]:
        """Give the prompt where it is echoed or its ids are asked for."""
        ids = self._submissions[i].token_ids if self._ask.return_token_ids else None
        if not self._ask.echo:
            return [] if ids is None else [self._chunk(index, "", None, prompt_token_ids=ids)]
        return [self._chunk(index, self._prompt_text(i), self._echoed_entries(i, index), prompt_token_ids=ids)]

    def _chunk(
        self,
        index: int,
        text: str,
        entries: dict[str, Any] | None,
        finish_reason: str | None = None,
        *,
        stop_reason: int | str | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": entries, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        choice |= {name: value for name, value in more.items() if value is not None}
        usage = self._tally.usage() if self._has_running_usage else None
        return self._around.frame([choice], usage=usage)
