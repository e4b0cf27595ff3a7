"""`SamplingParams` in the native sampler's terms. Knows no slots: the native runner keeps one value a slot."""

from collections.abc import Sequence

from tiercel import _native
from tiercel.protocol.params import SamplingParams

_UINT64 = 2**64 - 1
_TOP_K_MAX = 2**31 - 1  # more than any vocabulary; SamplingParams allows more than int64 can add to


def native_params(params: SamplingParams, seed: int, stop_ids: Sequence[int]) -> _native.SamplerParams:
    """Return the `_native.SamplerParams` of a sequence; `seed` and `stop_ids` are those of `Runner.admit`."""
    return _native.make_sampler_params(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(params.top_k, _TOP_K_MAX),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=seed & _UINT64,
        min_tokens=params.min_tokens,
        stop_ids=list(stop_ids),
        logit_bias=list((params.logit_bias or {}).items()),
        allowed_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bad_words=[list(word) for word in params.bad_words_token_ids],
        told_ids=list(params.logprob_token_ids or ()),
    )
