"""Beam search as requests ask for it: `use_beam_search`, with `n` as its width. What it cannot keep to is refused.

Knows no search: that is `engine.beams`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tiercel.base.errors import RequestError
from tiercel.protocol.beams import BeamSearchParams
from tiercel.protocol.params import SamplingParams

if TYPE_CHECKING:
    from tiercel.api.http.schema import Generation

# Field -> the values at which it means the same with beams. The likeliest sequences are looked for by the model's own
# probabilities: nothing is drawn (so any seed will do), and nothing changes or ends them but end-of-sequence.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "stream": (False,),
    "stream_interval": (1,),
    "kv_transfer_params": (),
    "cache_hint": (),
}


def check_beams(ask: "Generation") -> None:
    """Refuse what a beam search cannot keep to, and what is said of one that is not asked for.

    Raises: RequestError: `param` names the field.
    """
    if not ask.use_beam_search:
        if ask.length_penalty not in (None, 1.0):
            raise RequestError(
                f"length_penalty: got {ask.length_penalty} without a beam search; set use_beam_search to true, or "
                "leave it out",
                param="length_penalty",
            )
        return
    for name, neutral in _NEUTRAL.items():
        value = getattr(ask, name)
        if value is not None and value not in neutral:
            raise RequestError(
                f"{name}: it cannot be kept to in a beam search, which ranks by the model's own probabilities and is "
                "answered whole; leave it out, or use_beam_search",
                param=name,
            )


def step_params(ask: "Generation", max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Give the parameters that count for a prompt and its answer; a search draws nothing, so it recommends nothing."""
    same = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed")
    given = {name: value for name in same if (value := getattr(ask, name)) is not None}
    return SamplingParams(**given, temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)


def beams_of(ask: "Generation", params: SamplingParams) -> BeamSearchParams | None:
    """Give the search that a request asks for; None: it asks for none.

    Raises: RequestError
    """
    if not ask.use_beam_search:
        return None
    return BeamSearchParams(
        beam_width=ask.n or 1,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if ask.length_penalty is None else ask.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
    )
