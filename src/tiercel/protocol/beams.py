"""What a beam search is asked and what it finds, under vLLM's names."""

import math
from dataclasses import dataclass, field

import msgspec

from tiercel.base.errors import RequestError
from tiercel.protocol.outputs import PositionLogprobs

LENGTH_PENALTY_MAX = 100.0
_COUNT_MAX = 2**31 - 1


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the likeliest sequences are looked for.

        beam_width       sequences that are followed at once, and given; 1 is greedy. Twice as many tokens are looked at
                         in each place, so at most half of the engine's max_logprobs
        max_tokens       tokens of one sequence; None: to the end of the context
        ignore_eos       end-of-sequence ends nothing; it is a token as any other
        temperature      0 or 1: sequences are ranked by the model's own probabilities, and nothing is drawn
        length_penalty   a sequence's score is its log-probability / its tokens ** length_penalty, end-of-sequence not
                         counted: above 0 favours long ones; -100..100
        include_stop_str_in_output, skip_special_tokens   what of the end is in the text
        logprobs         likeliest tokens told of for each place; None: none, over HTTP; `LLM.beam_search` tells of all
                         that were looked at

    Raises:
        RequestError: a value is out of its range; `param` names it.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("beam_width", 1), ("max_tokens", 1), ("logprobs", 0)):
            got = getattr(self, name)
            if got is None and name != "beam_width":
                continue
            if type(got) is not int or not least <= got <= _COUNT_MAX:
                raise _refused(name, got, f"a whole number, {least} or more")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "true or false")
        if not _is_number(self.temperature) or self.temperature not in (0, 1):
            raise _refused(
                "temperature", self.temperature, "0 or 1, as sequences are ranked by the model's own probabilities"
            )
        if not _is_number(self.length_penalty) or not abs(self.length_penalty) <= LENGTH_PENALTY_MAX:
            raise _refused("length_penalty", self.length_penalty, f"a number from -{LENGTH_PENALTY_MAX:g} to 100")

    @property
    def n_candidates(self) -> int:
        """Tokens looked at in each place. Of two times the width, as many as the width go on, whichever of them end."""
        return 2 * self.beam_width if self.beam_width > 1 else 1


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found.

    `tokens` are the prompt's and those found; `text` is of both. `logprobs` are of those found, the chosen token's
    entry first; `cum_logprob` is their sum. `finish_reason` is "stop" (end-of-sequence is its last token) or "length".
    """

    orig_prompt: object
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What was found for one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def _is_number(got: object) -> bool:
    return type(got) in (int, float) and math.isfinite(got)  # type: ignore[arg-type]  # it is a number


def _refused(name: str, got: object, needed: str) -> RequestError:
    return RequestError(f"{name}: got {got!r:.40}; needs {needed}", param=name)
