"""`SamplingParams`: what a request asks of its tokens, under vLLM's names and defaults.

Knows no vocabulary, tokenizer or engine. Invariants, from construction on:
1. Every value lies in the range its field names; counts and ids are ints and never bools, the rest are finite floats.
2. Sequences are tuples of this object's own; the caller's lists are copied, so later changes to them do nothing.
3. Two values that mean the same are spelt the same: `top_k` -1 is 0, `seed` -1 is None, and a greedy temperature is 0.0
   and has top_p 1.0, top_k 0 and min_p 0.0 (they cannot matter: the likeliest token is in all of them).

What depends on the model is checked where the model is known: ids against the vocabulary, `logprobs` against the
server's cap, `max_tokens` against the context. Read next: `sampling.reference`, which says what each number does.
"""

import difflib
import enum
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from tiercel.base.errors import RequestError, UnknownOption
from tiercel.protocol.repetition import RepetitionDetectionParams
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.protocol.tiers import CacheHint, KvTransferParams, as_hint, as_transfer

GREEDY_BELOW = 1e-5  # vLLM's threshold
TEMPERATURE_MIN = 0.01  # below it logits / temperature may overflow to infinities that tie
TEMPERATURE_MAX = 2.0
N_MAX = 16384  # a front end sets a lower one
N_STOP_MAX = 16
STOP_CHARS_MAX = 1024
N_LOGIT_BIAS_MAX = 1024
N_BAD_WORDS_MAX = 128  # words, and again token sequences
BAD_WORDS_TOKENS_MAX = 1024  # tokens of all the sequences together
N_LOGPROB_TOKEN_IDS_MAX = 128
LOGIT_BIAS_LIMIT = 100.0
_INT64 = (-(2**63), 2**63 - 1)

# Names that people know from elsewhere, with what to do instead. Others get the nearest name.
_GUIDED = "removed: structured_outputs=StructuredOutputsParams(json=..., regex=..., choice=..., grammar=...) has them"
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...)) has it"
_HINTS = {
    "best_of": "removed; ask for n outputs and rank them by cumulative_logprob",
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": "a beam search ends as soon as nothing better can be found; leave it out",
    "guided_decoding": _GUIDED,
    "response_format": "a field of chat requests; structured_outputs=StructuredOutputsParams(...) is the same here",
    "logits_processors": "functions over logits are not there yet; logit_bias, allowed_token_ids and bad_words are",
    "truncate_prompt_tokens": "not there yet; cut the prompt's token ids yourself",
    "max_new_tokens": "the name here is max_tokens",
    "max_completion_tokens": "the name here is max_tokens",
    "num_return_sequences": "the name here is n",
    "do_sample": "temperature=0 is greedy, anything above samples",
    "priority": "it is an argument of generate(), not of SamplingParams",
    "stream": "it is an argument of the call, not of SamplingParams; see output_kind",
}


class RequestOutputKind(enum.Enum):
    """What each output of a running request holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # one output, at the end


class _RefusesUnknown(msgspec.StructMeta):
    """Turns an unknown keyword into an error that names the nearest known one."""

    if not TYPE_CHECKING:  # a checker reads the fields instead

        def __call__(cls, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                unknown = [name for name in kwargs if name not in cls.__struct_fields__]
                if not unknown:
                    raise
            raise UnknownOption(_unknown_message(unknown[0], cls.__struct_fields__))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_RefusesUnknown):
    """How a request's tokens are chosen, when they end and what is told about them.

    Ranges:
        n                    1..16384; 1 when greedy
        temperature          0..2; below 1e-5 greedy; else below 0.01 raised to 0.01 with a warning
        top_p                above 0 up to 1
        top_k                -1 and up; -1, 0 and more than the vocabulary mean all
        min_p                0..1
        presence_penalty, frequency_penalty   -2..2, of generated tokens
        repetition_penalty   above 0, of prompt and generated tokens
        seed                 int64; -1 and None: a fresh one for each request
        stop                 up to 16 strings of 1..1024 characters
        stop_token_ids       ids, 0 and up
        max_tokens           1 and up; None: to the end of the context
        min_tokens           0..max_tokens
        logprobs, prompt_logprobs   0 and up; -1: the whole vocabulary; None: none
        logprob_token_ids    up to 128 ids: log-probabilities of exactly these, in this order, and of the chosen token,
                             in place of the likeliest; logprobs is left out, or says how many they are
        logit_bias           up to 1024 ids; each value in -100..100
        allowed_token_ids    at least one id
        bad_words            up to 128 non-empty strings
        bad_words_token_ids  what the engine's tokenizer makes of bad_words; not for callers
        thinking_token_budget   tokens of reasoning, 0 and up, after which the model is made to end it; -1 and None: no
                             limit. Needs a model whose marks of reasoning are known (`text.thinking_budget`)
        repetition_detection    ends an output whose last tokens only repeat themselves (`protocol.repetition`)
        stream_interval      tokens that an output of a stream has at least, but for its first and its last; 1 and up,
                             and no less than the engine's own; None: the engine's
        kv_transfer_params   what tiers of the KV cache load and store for it (`protocol.tiers`); a mapping is read
        cache_hint           {"pin": true, "ttl_s": seconds}: keep its prompt's pages (`protocol.tiers`)
        structured_outputs   the form of the text (`protocol.structured`); it may end before min_tokens when it is
        complete

    Raises:
        RequestError: a value is out of its range; `param` names it.
        UnknownOption: a keyword is none of these.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None  # None: only when prompt_logprobs needs every position computed
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: int | None = None
    kv_transfer_params: KvTransferParams | None = None
    cache_hint: CacheHint | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        self._check_strings()
        self._check_ids()
        if self.temperature < GREEDY_BELOW:
            self._become_greedy()
        if self.skip_reading_prefix_cache is None:
            _set(self, "skip_reading_prefix_cache", self.prompt_logprobs is not None)
        elif self.prompt_logprobs is not None and not self.skip_reading_prefix_cache:
            raise _refused(
                "skip_reading_prefix_cache",
                self.skip_reading_prefix_cache,
                "true or null with prompt_logprobs, as only computed positions have some",
                "leave it out",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop  # type: ignore[return-value]  # invariant 2

    def clone(self) -> "SamplingParams":
        """Return an equal value. Nothing in it can be changed, so there is rarely a need."""
        return msgspec.structs.replace(self)

    def _check_numbers(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            got = getattr(self, name)
            value = _as_float(name, got, low, high)
            if value is not got:
                _set(self, name, value)
        if self.top_p == 0.0:
            raise _refused("top_p", self.top_p, "a number above 0, up to 1", "top_k=1 keeps one token")
        if self.repetition_penalty == 0.0:
            raise _refused(
                "repetition_penalty", self.repetition_penalty, "a finite number above 0", "1 switches it off"
            )
        if GREEDY_BELOW <= self.temperature < TEMPERATURE_MIN:
            warnings.warn(
                f"temperature: {self.temperature} is raised to {TEMPERATURE_MIN}; 0 is greedy", stacklevel=_CALLER_LEVEL
            )
            _set(self, "temperature", TEMPERATURE_MIN)

    def _check_counts(self) -> None:
        for name, low, high in _INT_RANGES:
            got = getattr(self, name)
            if got is None and name in _MAY_BE_NONE:
                continue
            value = _as_int(name, got, low, high)
            if value is not got:
                _set(self, name, value)
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "true or false", "")
        if self.skip_reading_prefix_cache is not None and type(self.skip_reading_prefix_cache) is not bool:
            raise _refused("skip_reading_prefix_cache", self.skip_reading_prefix_cache, "true, false or null", "")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise _refused("structured_outputs", self.structured_outputs, "StructuredOutputsParams", "")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise _refused("repetition_detection", self.repetition_detection, "RepetitionDetectionParams", "")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _refused("output_kind", self.output_kind, "a RequestOutputKind", "")
        if self.kv_transfer_params is not None:
            _set(self, "kv_transfer_params", as_transfer(self.kv_transfer_params))
        if self.cache_hint is not None:
            _set(self, "cache_hint", as_hint(self.cache_hint))
        if self.top_k == -1:
            _set(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            _set(self, "thinking_token_budget", None)
        if self.seed == -1:
            _set(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}", "raise max_tokens"
            )

    def _check_strings(self) -> None:
        if not _is_empty(self.stop):
            stop = [self.stop] if isinstance(self.stop, str) else self.stop
            _set(self, "stop", _as_strings("stop", stop, N_STOP_MAX, STOP_CHARS_MAX))
            if self.stop and not self.detokenize:
                raise _refused(
                    "stop", self.stop, "detokenize=True, as strings are looked for in text", "use stop_token_ids"
                )
        if not _is_empty(self.bad_words):
            _set(self, "bad_words", _as_strings("bad_words", self.bad_words, N_BAD_WORDS_MAX, STOP_CHARS_MAX))

    def _check_ids(self) -> None:
        if not _is_empty(self.stop_token_ids):
            _set(
                self,
                "stop_token_ids",
                _as_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids),
            )
        if self.allowed_token_ids is not None:
            ids = _as_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise _refused("allowed_token_ids", [], "at least one id, or null for all", "leave it out")
            _set(self, "allowed_token_ids", ids)
        if self.logprob_token_ids is not None:
            self._check_named()
        if self.logit_bias is not None:
            _set(self, "logit_bias", _as_bias(self.logit_bias))
        if not _is_empty(self.bad_words_token_ids):
            _set(self, "bad_words_token_ids", _as_sequences(self.bad_words_token_ids))

    def _check_named(self) -> None:
        ids = _as_ids("logprob_token_ids", self.logprob_token_ids)
        n = len(ids)
        if not 1 <= n <= N_LOGPROB_TOKEN_IDS_MAX:
            raise _refused("logprob_token_ids", f"{n} ids", f"1 to {N_LOGPROB_TOKEN_IDS_MAX}, or null", "")
        if self.logprobs is not None and self.logprobs != n:
            raise _refused(
                "logprobs",
                self.logprobs,
                f"{n} or null with so many logprob_token_ids, which it tells of",
                "leave it out",
            )
        _set(self, "logprob_token_ids", ids)
        _set(self, "logprobs", n)

    def _become_greedy(self) -> None:
        if self.n > 1:
            raise _refused("n", self.n, "1 when temperature is 0, as all outputs would be equal", "raise temperature")
        for name, value in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            _set(self, name, value)


_set = force_setattr
# Frames from warnings.warn to the line that made the params: _check_numbers, __post_init__, the metaclass's __call__.
_CALLER_LEVEL = 4
_FLOAT_RANGES = (
    ("temperature", 0.0, TEMPERATURE_MAX),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, math.inf),
)
_INT_RANGES = (
    ("n", 1, N_MAX),
    ("top_k", -1, _INT64[1]),
    ("seed", *_INT64),
    ("max_tokens", 1, _INT64[1]),
    ("min_tokens", 0, _INT64[1]),
    ("logprobs", -1, _INT64[1]),
    ("prompt_logprobs", -1, _INT64[1]),
    ("thinking_token_budget", -1, _INT64[1]),
    ("stream_interval", 1, _INT64[1]),
)
_MAY_BE_NONE = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget", "stream_interval"}
)
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


def _is_empty(got: object) -> bool:
    """Whether `got` is the default; an array must not be compared with it."""
    return type(got) is tuple and not got


def _refused(name: str, got: object, needed: str, what_to_do: str) -> RequestError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    tail = f"; {what_to_do}" if what_to_do else ""
    return RequestError(f"{name}: got {shown}; needs {needed}{tail}", param=name)


def _unknown_message(name: str, known: Iterable[str]) -> str:
    if name.startswith("guided_"):
        return f"SamplingParams: got {name}; {_GUIDED}"
    if name in _HINTS:
        return f"SamplingParams: got {name}; {_HINTS[name]}"
    public = [k for k in known if k != "bad_words_token_ids"]
    nearest = difflib.get_close_matches(name, public, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(public)}"
    return f"SamplingParams: got {name!r}; needs a known option; {hint}"


def _as_float(name: str, got: Any, low: float, high: float) -> float:
    """Return `got` as a finite float in low..high; a NaN fails both comparisons."""
    needed = f"a number from {low:g} to {high:g}" if high != math.inf else "a finite number above 0"
    if type(got) is not float:
        if isinstance(got, (bool, str, bytes)) or not hasattr(got, "__float__"):
            raise _refused(name, got, needed, "")
        try:
            got = float(got)
        except (TypeError, ValueError, OverflowError):
            raise _refused(name, got, needed, "") from None
    if not (low <= got <= high and got < math.inf):
        raise _refused(name, got, needed, "")
    return got  # type: ignore[no-any-return]


def _as_int(name: str, got: Any, low: int, high: int) -> int:
    if type(got) is not int:
        try:
            value = None if isinstance(got, bool) else operator.index(got)
        except TypeError:
            value = None
        if value is None:
            raise _refused(name, got, "a whole number", "")
        got = value
    if not low <= got <= high:
        is_open = high == _INT64[1] and low >= -1 and got < low
        needed = f"a whole number, {low} or more" if is_open else f"a whole number from {low} to {high}"
        raise _refused(name, got, needed, "")
    return got  # type: ignore[no-any-return]


def _as_strings(name: str, got: Any, n_max: int, chars_max: int) -> tuple[str, ...]:
    if got is None:
        return ()
    if isinstance(got, (str, bytes)) or not isinstance(got, Sequence):
        raise _refused(name, got, "a list of strings", "")
    if len(got) > n_max:
        raise RequestError(f"{name}: got {len(got)} strings; needs at most {n_max}; leave some out", param=name)
    for text in got:
        if not isinstance(text, str):
            raise _refused(name, text, "strings", "")
        if not 1 <= len(text) <= chars_max:
            raise _refused(
                name,
                text,
                f"strings of 1 to {chars_max} characters",
                "an empty one would match everywhere; leave it out",
            )
    return tuple(got)


def _as_ids(name: str, got: Any) -> tuple[int, ...]:
    """Return the ids in their order, each once."""
    if isinstance(got, (str, bytes, Mapping)) or not isinstance(got, Iterable):
        raise _refused(name, got, "a list of token ids", "")
    return tuple(dict.fromkeys(_as_int(name, one, 0, 2**31 - 1) for one in got))


def _as_bias(got: Any) -> dict[int, float]:
    """Return the map with int keys; JSON can only spell them as strings."""
    if not isinstance(got, Mapping):
        raise _refused("logit_bias", got, "a map from token id to a number", "")
    if len(got) > N_LOGIT_BIAS_MAX:
        raise _refused("logit_bias", f"{len(got)} ids", f"at most {N_LOGIT_BIAS_MAX}", "")
    bias: dict[int, float] = {}
    for key, value in got.items():
        token_id: Any = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        token_id = _as_int("logit_bias", token_id, 0, 2**31 - 1)
        if token_id in bias:
            raise _refused("logit_bias", key, "each token id once", "")
        bias[token_id] = _as_float("logit_bias", value, -LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT)
    return bias


def _as_sequences(got: Any) -> tuple[tuple[int, ...], ...]:
    sequences = tuple(tuple(_as_int("bad_words", one, 0, 2**31 - 1) for one in ids) for ids in got)
    if not all(sequences):
        raise _refused("bad_words", "a word of no tokens", "words of at least one token", "leave it out")
    if len(sequences) > N_BAD_WORDS_MAX:
        raise _refused(
            "bad_words", f"{len(sequences)} token sequences", f"at most {N_BAD_WORDS_MAX}", "give fewer words"
        )
    n_tokens = sum(map(len, sequences))
    if n_tokens > BAD_WORDS_TOKENS_MAX:
        raise _refused(
            "bad_words", f"{n_tokens} tokens", f"at most {BAD_WORDS_TOKENS_MAX} in all", "give fewer or shorter words"
        )
    return sequences
