"""From a request's fields to `SamplingParams`: the request's value, else the model's recommendation, else the constant.

Knows no prompt. What only shapes the answer (echo, usage, streams) is checked here too, before any work is done.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tiercel.api.http.beams import check_beams, step_params
from tiercel.api.http.schema import ChatRequest, CompletionRequest, Generation
from tiercel.api.http.settings import ServerSettings
from tiercel.api.http.structured import form_of
from tiercel.base.errors import PromptTooLong, RequestError
from tiercel.protocol.params import GREEDY_BELOW, TEMPERATURE_MIN, SamplingParams
from tiercel.protocol.repetition import RepetitionDetectionParams

_log = logging.getLogger(__name__)

COMPLETION_TOKENS: Final = 16  # OpenAI's default of /v1/completions
# Fields that mean the same here and there.
_SAME: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "stream_interval",
    "logprob_token_ids",
    "kv_transfer_params",
    "cache_hint",
)
# What a model may recommend (generation_config.json), by its name here.
_RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def usable_defaults(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a model recommends and a request may leave out; say in the log what is not usable."""
    named = {name: recommended.get(name) for name in _RECOMMENDED}
    named["max_tokens"] = recommended.get("max_new_tokens")
    usable = {}
    for name, value in named.items():
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            _log.warning("the model's generation config is not followed: %s", error)
        else:
            usable[name] = value
    return usable


def check_stream(ask: Generation) -> None:
    """Refuse what contradicts the way the answer is sent.

    Raises: RequestError
    """
    if ask.stream_options is not None and not ask.stream:
        raise RequestError(
            "stream_options: got some without a stream; stream true is needed; leave it out", param="stream_options"
        )
    if ask.stream and ask.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: got it with a stream; a whole answer is needed; set stream to false",
            param="prompt_logprobs",
        )
    if ask.cache_salt == "":
        raise RequestError("cache_salt: it is empty; some text is needed; leave it out", param="cache_salt")


def chat_params(
    ask: ChatRequest,
    defaults: Mapping[str, Any],
    settings: ServerSettings,
    *,
    max_model_len: int,
    max_logprobs: int,
) -> SamplingParams:
    """Build the parameters of a chat.

    Raises: RequestError: a value is wrong; `param` names its field.
    """
    name = "max_tokens" if ask.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(ask, name)
    max_tokens = defaults.get("max_tokens") if asked is None else asked
    if asked is not None:
        if asked < 1:
            raise RequestError(f"{name}: got {asked}; 1 or more is needed", param=name)
        _check_room(name, asked, max_model_len)
    return _params(ask, defaults, settings, max_tokens=max_tokens, logprobs=_chat_logprobs(ask, max_logprobs))


def completion_params(
    ask: CompletionRequest, defaults: Mapping[str, Any], settings: ServerSettings, max_model_len: int
) -> SamplingParams:
    """Build the parameters of a completion. `max_tokens` 0 is 1 to the engine; the answer leaves that token out.

    Raises: RequestError: a value is wrong; `param` names its field.
    """
    max_tokens = COMPLETION_TOKENS if ask.max_tokens is None else ask.max_tokens
    if max_tokens == 0:
        if not ask.echo:
            raise RequestError(
                "max_tokens: got 0; 1 or more is needed, but to score a prompt; set echo to true", param="max_tokens"
            )
        max_tokens = 1
    _check_room("max_tokens", max_tokens, max_model_len)
    if ask.logprobs is not None and ask.logprobs < 0:
        raise RequestError(f"logprobs: got {ask.logprobs}; 0 or more is needed", param="logprobs")
    prompt_logprobs = ask.logprobs if ask.echo and ask.prompt_logprobs is None else ask.prompt_logprobs
    return _params(
        ask, defaults, settings, max_tokens=max_tokens, logprobs=ask.logprobs, prompt_logprobs=prompt_logprobs
    )


def _check_counts(ask: Generation, settings: ServerSettings) -> None:
    """Refuse more than this server takes; what the sampler takes, `SamplingParams` checks."""
    for name, most in (
        ("stop", settings.n_stop_max),
        ("bad_words", settings.n_bad_words_max),
        ("logit_bias", settings.n_logit_bias_max),
    ):
        got = getattr(ask, name)
        if got is not None and not isinstance(got, str) and len(got) > most:
            raise RequestError(f"{name}: got {len(got)}; at most {most} are taken; send fewer", param=name)


def _check_room(name: str, max_tokens: int, max_model_len: int) -> None:
    if max_tokens > max_model_len:
        raise PromptTooLong(
            f"{name}: got {max_tokens}; a sequence has at most {max_model_len} tokens, prompt and answer together; "
            "lower it",
            param=name,
        )


def _chat_logprobs(ask: ChatRequest, n_most: int) -> int | None:
    n = ask.top_logprobs
    if ask.logprob_token_ids is not None:
        n_named = len(dict.fromkeys(ask.logprob_token_ids))
        if ask.logprobs is False:
            raise RequestError("logprobs: got false with logprob_token_ids; leave one of them out", param="logprobs")
        if n not in (None, 0, n_named):
            raise RequestError(
                f"top_logprobs: got {n}; exactly the {n_named} of logprob_token_ids are told of; leave one of them out",
                param="top_logprobs",
            )
        return None
    if n is not None and n < -1:
        raise RequestError(f"top_logprobs: got {n}; 0 or more is needed, or -1 for all", param="top_logprobs")
    if n and not ask.logprobs:
        raise RequestError(f"top_logprobs: got {n} without logprobs; set logprobs to true", param="top_logprobs")
    # The engine checks this too, but would name a field that the client never sent a number in.
    if n is not None and n_most != -1 and not 0 <= n <= n_most:
        raise RequestError(
            f"top_logprobs: got {n}{' (all)' if n == -1 else ''}; at most {n_most} are allowed; lower it or raise "
            "max_logprobs",
            param="top_logprobs",
        )
    return (n or 0) if ask.logprobs else None


def _params(
    ask: Generation,
    defaults: Mapping[str, Any],
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    given = {name: defaults[name] for name in _RECOMMENDED if name in defaults}
    given |= {name: value for name in _SAME if (value := getattr(ask, name)) is not None}
    n = 1 if ask.n is None else ask.n
    if not 1 <= n <= settings.n_outputs_max:
        raise RequestError(
            f"n: got {n}; 1 to {settings.n_outputs_max} is needed; lower it or raise n_outputs_max", param="n"
        )
    _check_counts(ask, settings)
    check_beams(ask)
    if ask.use_beam_search:
        if prompt_logprobs is not None:
            raise RequestError(
                "logprobs: the prompt's, with echo, are not given with a beam search; leave one of them out",
                param="logprobs",
            )
        return step_params(ask, max_tokens, logprobs)
    temperature = given.get("temperature")
    if temperature is not None and GREEDY_BELOW <= temperature < TEMPERATURE_MIN:
        given["temperature"] = TEMPERATURE_MIN  # as SamplingParams does, which warns: of no use in a server's log
    return SamplingParams(
        **given,
        n=n,
        structured_outputs=form_of(ask),
        repetition_detection=_repetition(ask),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=ask.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
    )


def _repetition(ask: Generation) -> RepetitionDetectionParams | None:
    given = ask.repetition_detection
    return None if given is None else RepetitionDetectionParams(**msgspec.structs.asdict(given))
