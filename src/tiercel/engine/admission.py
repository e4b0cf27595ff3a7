"""What a request must be to be accepted, given the model's and the pool's limits. Pure; knows no state of the engine.

`SamplingParams` has checked what needs no model. Nothing here is clamped in silence but one thing, as in vLLM:
`max_tokens` beyond the context ends at the context, and the output then says "length".
"""

from collections.abc import Iterable

from tiercel.base.errors import PromptTooLong, RequestError
from tiercel.engine.config import EngineConfig
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import RunnerLimits

_N_SHOWN = 5  # bad ids listed in a message
_N_CHARS = 20  # of one of them


def admit(
    prompt_ids: list[int], params: SamplingParams, limits: RunnerLimits, config: EngineConfig, *, priority: int = 0
) -> int:
    """Check a request; return the most tokens, prompt and output together, that one of its outputs may reach.

    Raises:
        PromptTooLong: the prompt leaves no room for a token, or prompt and max_tokens can never fit the pool.
        RequestError: anything else; `param` names the field.
    """
    if not prompt_ids:
        raise RequestError("prompt: it is empty; at least one token is needed; send some text", param="prompt")
    _check_ids("prompt", prompt_ids, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids or (), limits.vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    for word_ids in params.bad_words_token_ids:
        _check_ids("bad_words", word_ids, limits.vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids or (), limits.vocab_size)
    if params.logprob_token_ids is None:
        _check_logprobs("logprobs", params.logprobs, limits.vocab_size, config.max_logprobs)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, limits.vocab_size, config.max_logprobs)
    _check_priority(priority, config)
    return _max_total_tokens(len(prompt_ids), params, limits)


def admit_pooled(prompt_ids: list[int], limits: RunnerLimits, config: EngineConfig, *, priority: int = 0) -> None:
    """Check a text that is to be pooled, not gone on with.

    Raises:
        PromptTooLong: it does not fit the context, the pool, or the one step that it must be computed in.
        RequestError: anything else; `param` names the field.
    """
    if not prompt_ids:
        raise RequestError("prompt: it is empty; at least one token is needed; send some text", param="prompt")
    _check_ids("prompt", prompt_ids, limits.vocab_size)
    _check_priority(priority, config)
    n_max = min(limits.max_len_tokens, limits.pool_tokens)
    whole = ""
    if limits.needs_whole and limits.max_step_tokens < n_max:
        n_max, whole = limits.max_step_tokens, " in one step, as this model needs; raise max_num_batched_tokens,"
    if len(prompt_ids) > n_max:
        raise PromptTooLong(
            f"prompt: {len(prompt_ids)} tokens; at most {n_max} fit{whole or ';'} shorten it, or set "
            "truncate_prompt_tokens",
            param="prompt",
        )


def _check_priority(priority: int, config: EngineConfig) -> None:
    if priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority: got {priority}; 0 is needed, as this engine serves first come first; "
            "leave it out, or start the engine with scheduling_policy=priority",
            param="priority",
        )


def _max_total_tokens(n_prompt: int, params: SamplingParams, limits: RunnerLimits) -> int:
    context = limits.max_len_tokens
    if n_prompt >= context:
        raise PromptTooLong(
            f"prompt: {n_prompt} tokens; at most {context - 1} fit, to leave room for one more in a context of "
            f"{context}; shorten it",
            param="prompt",
        )
    # The last token is never computed, so it needs no slot in a page.
    pool_tokens = limits.pool_tokens + 1
    n_total = context if params.max_tokens is None else min(context, n_prompt + params.max_tokens)
    if n_total > pool_tokens and (params.max_tokens is not None or n_prompt >= pool_tokens):
        raise PromptTooLong(
            f"prompt: {n_prompt} tokens and max_tokens={params.max_tokens} come to {n_total}; at most {pool_tokens} "
            f"can ever fit, in {limits.n_pages} pages of {limits.page_size_tokens}; "
            "shorten it, lower max_tokens or raise kv_cache_memory_bytes",
            param="prompt",
        )
    n_total = min(n_total, pool_tokens)
    if params.min_tokens > n_total - n_prompt:
        raise RequestError(
            f"min_tokens: got {params.min_tokens}; at most {n_total - n_prompt} are left after a prompt of {n_prompt} "
            f"tokens in a context of {context}; lower it or shorten the prompt",
            param="min_tokens",
        )
    return n_total


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    bad = [i for i in ids if not (type(i) is int and 0 <= i < vocab_size)]
    if bad:
        shown = ", ".join(map(_short, bad[:_N_SHOWN])) + (", ..." if len(bad) > _N_SHOWN else "")
        raise RequestError(f"{name}: got ids {shown}; whole numbers from 0 to {vocab_size - 1} are needed", param=name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _N_CHARS else f"{text[:_N_CHARS]}..."


def _check_logprobs(name: str, n: int | None, vocab_size: int, n_max: int) -> None:
    allowed = vocab_size if n_max == -1 else n_max
    wanted = vocab_size if n == -1 else n
    if wanted is not None and wanted > allowed:
        shown = f"{n} (the vocabulary, {vocab_size})" if n == -1 else str(n)
        raise RequestError(
            f"{name}: got {shown}; at most {allowed} are allowed; lower it or raise max_logprobs", param=name
        )
    if wanted is not None and wanted > vocab_size:
        raise RequestError(f"{name}: got {n}; at most the vocabulary's {vocab_size} are there; lower it", param=name)
