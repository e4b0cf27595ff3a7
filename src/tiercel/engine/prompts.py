"""Prompts in every shape that a caller may send, made into checked requests. Knows no engine, only its limits.

Shapes: text; a list of token ids; a dict with `prompt` or `prompt_token_ids` (with both, the ids are computed and the
text is only repeated) and `cache_salt`.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.base.errors import PromptTooLong, RequestError
from tiercel.engine.admission import admit, admit_pooled
from tiercel.engine.config import EngineConfig
from tiercel.engine.request import Pools
from tiercel.protocol.params import RequestOutputKind, SamplingParams
from tiercel.protocol.pooling import PoolingParams
from tiercel.protocol.step import RunnerLimits
from tiercel.text.bad_words import bad_words_ids

if TYPE_CHECKING:
    from tiercel.sampling.grammars import CompiledGrammar, Grammars
    from tiercel.text.thinking import ThinkingMarks
    from tiercel.text.thinking_budget import ReasoningMarkers, ThinkingBudget
    from tiercel.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


class PreparedRequest(msgspec.Struct, frozen=True):
    """A request that was checked and not yet sent."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    priority: int
    cache_salt: str | None
    grammar: "CompiledGrammar | None" = None
    budget: "ThinkingBudget | None" = None
    pools: Pools | None = None
    n_first: int | None = None


class PromptReader:
    """Reads prompts for one model. Frozen; threads may share it."""

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        limits: RunnerLimits,
        config: EngineConfig,
        grammars: "Callable[[], Grammars] | None" = None,
        reasoning: "Callable[[], ReasoningMarkers | None]" = lambda: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._config = config
        self._grammars = grammars
        self._reasoning = reasoning

    def encode_together(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Tokenise all prompts that are text in one call, which may use several threads."""
        done = list(prompts)
        if self._tokenizer is None:
            return done
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        texts = [str(prompts[i]) for i in places]
        for text in texts:
            self._check_chars(text)
        encoded = self._tokenizer.encode_many(texts) if texts else []
        for i, text, token_ids in zip(places, texts, encoded, strict=True):
            done[i] = {"prompt": text, "prompt_token_ids": token_ids}
        return done

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str | None,
        thinking: "ThinkingMarks | None" = None,
    ) -> PreparedRequest:
        """Check a prompt and its parameters against the model. `thinking` says whether the prompt opens reasoning;
        None: its marks do.

        Raises:
            RequestError: it is refused; `param` names the field.
        """
        if self._limits.row_width:
            raise RequestError(
                "model: it pools and does not generate; ask for embed, classify, score or encode, or their routes",
                param="model",
            )
        text, token_ids, own_salt = self._read(prompt)
        cache_salt = _as_salt(own_salt if cache_salt is None else cache_salt)
        priority = _as_priority(priority)
        params = self._with_words(params)
        max_total = admit(token_ids, params, self._limits, self._config, priority=priority)
        has_reasoned = thinking is None or thinking.is_open
        budget = self._budget(params, token_ids if has_reasoned else [])
        grammar = self._grammar(params)
        return PreparedRequest(text, token_ids, params, max_total, priority, cache_salt, grammar, budget)

    def prepare_pooled(
        self,
        prompt: Prompt,
        params: PoolingParams,
        pools: Pools,
        *,
        second: str | None = None,
        is_framed: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PreparedRequest:
        """Check a text, or with `second` a pair of texts, that is to be pooled.

        Raises:
            RequestError: it is refused; `param` names the field.
        """
        n_max = params.truncate_prompt_tokens
        if n_max is not None:
            limits = self._limits
            fits = min(limits.max_len_tokens, limits.max_step_tokens if limits.needs_whole else limits.max_len_tokens)
            if n_max > fits:
                raise RequestError(
                    f"truncate_prompt_tokens: got {n_max}; at most {fits} tokens fit; lower it, or set -1",
                    param="truncate_prompt_tokens",
                )
            n_max = fits if n_max == -1 else n_max
        side = params.truncation_side or "right"
        own_salt = None
        n_first = None
        if (
            isinstance(prompt, Mapping)
            and prompt.get("prompt_token_ids") is None
            and isinstance(prompt.get("prompt"), str)
        ):
            own_salt = prompt.get("cache_salt")
            prompt = str(prompt["prompt"])
        if isinstance(prompt, str):
            text, (token_ids, n_first) = prompt, self._encode_framed(prompt, second, n_max, side, is_framed=is_framed)
        else:
            text, token_ids, own_salt = self._read(prompt)  # type: ignore[assignment]
            if n_max is not None:
                token_ids = token_ids[:n_max] if side == "right" else token_ids[-n_max:]
        priority = _as_priority(priority)
        admit_pooled(token_ids, self._limits, self._config, priority=priority)
        plain = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        salt = _as_salt(own_salt if cache_salt is None else cache_salt)
        n_first = n_first if self._limits.n_segments > 1 else None
        return PreparedRequest(text, token_ids, plain, len(token_ids), priority, salt, pools=pools, n_first=n_first)

    def _encode_framed(
        self, text: str, second: str | None, n_max: int | None, side: str, *, is_framed: bool
    ) -> tuple[list[int], int | None]:
        if self._tokenizer is None:
            raise RequestError("prompt: got text; this model has no tokenizer; send prompt_token_ids", param="prompt")
        # A vocabulary of words takes any number of spaces, or of unknown letters, for nothing or for one token.
        if n_max is None and self._tokenizer.byte_decoding is not None:
            for one in (text, second or ""):
                self._check_chars(one)
        return self._tokenizer.encode_framed(text, second, n_max=n_max, side=side, is_framed=is_framed)

    def _budget(self, params: SamplingParams, prompt_ids: Sequence[int]) -> "ThinkingBudget | None":
        """Begin the count of a bounded reasoning, with the prompt's own in it."""
        n_max = params.thinking_token_budget
        if n_max is None:
            return None
        markers = self._reasoning()
        if self._tokenizer is None or markers is None:
            raise RequestError(
                f"thinking_token_budget: got {n_max}; what this model's reasoning begins and ends with is not known; "
                "leave it out, or start the server with reasoning_parser or reasoning_config",
                param="thinking_token_budget",
            )
        from tiercel.text.thinking_budget import ThinkingBudget

        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        budget = ThinkingBudget.start(
            markers, n_max, prompt_ids, encode=encode, token_bytes=self._tokenizer.token_bytes
        )
        _check_forced(budget.forced_ids, params, ends=self._tokenizer.eos_ids)
        return budget

    def _grammar(self, params: SamplingParams) -> "CompiledGrammar | None":
        """Compile the form that the text must have. Last of all: nothing else takes so long."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise params.structured_outputs.refused("got a form of text; this model has no tokenizer; leave it out")
        return self._grammars().compile(params.structured_outputs)

    def _with_words(self, params: SamplingParams) -> SamplingParams:
        """Turn forbidden words into tokens; refuse what needs text where there is none."""
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name}: got text; this model has no tokenizer; use stop_token_ids or logit_bias", param=name
                    )
        elif params.bad_words:
            words = bad_words_ids(self._tokenizer, list(params.bad_words))
            return msgspec.structs.replace(params, bad_words_token_ids=words)
        return params

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Take a prompt apart: its text if it has one, its token ids, its salt."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt), None
        if not isinstance(prompt, Mapping):
            if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
                raise _wrong_kind(prompt)
            return None, _as_ids(prompt), None
        unknown = [key for key in prompt if key not in _FIELDS]
        if unknown:
            raise RequestError(
                f"prompt: got a field {unknown[0]!r}; known are {', '.join(_FIELDS)}; leave it out", param="prompt"
            )
        text, token_ids, salt = (prompt.get(name) for name in _FIELDS)
        if text is not None and not isinstance(text, str):
            raise _wrong_kind(text)
        return text, self._encode(text) if token_ids is None else _as_ids(token_ids), salt

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise _wrong_kind(text)
        if self._tokenizer is None:
            raise RequestError("prompt: got text; this model has no tokenizer; send prompt_token_ids", param="prompt")
        self._check_chars(text)
        return self._tokenizer.encode(text)

    def _check_chars(self, text: str) -> None:
        """Refuse a text that cannot fit, before any time is spent on cutting it."""
        assert self._tokenizer is not None
        context = self._limits.max_len_tokens
        n_max = context * self._tokenizer.max_chars_per_token
        if len(text) > n_max:
            raise PromptTooLong(
                f"prompt: {len(text)} characters; no more than {n_max} can fit a context of {context} tokens; "
                "shorten it",
                param="prompt",
            )


def _check_forced(forced_ids: Sequence[int], params: SamplingParams, *, ends: Iterable[int]) -> None:
    """Refuse what would forbid a token that ends the reasoning: a mask forces it, and other constraints still count.

    Raises: RequestError: `param` names the other field.
    """
    forced = set(forced_ids)
    name = ""
    if params.allowed_token_ids is not None and not forced <= set(params.allowed_token_ids):
        name = "allowed_token_ids"
    elif any(_holds(forced_ids, word) for word in params.bad_words_token_ids):
        name = "bad_words"
    elif params.min_tokens and forced & {*(params.stop_token_ids or ()), *ends}:
        name = "min_tokens"
    if name:
        raise RequestError(
            f"{name}: with thinking_token_budget, it would forbid a token of what ends the reasoning; loosen it, or "
            "leave one of them out",
            param=name,
        )


def _holds(ids: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(ids[i : i + len(word)]) == tuple(word) for i in range(len(ids) - len(word) + 1))


def _wrong_kind(got: Any) -> RequestError:
    return RequestError(
        f"prompt: got {type(got).__name__}; text, a list of token ids, or a dict with prompt or prompt_token_ids "
        "is needed",
        param="prompt",
    )


def _as_priority(got: Any) -> int:
    """Take a whole number: the queue is sorted by it, so anything else would end the engine and not the request."""
    if type(got) is not int:
        if isinstance(got, bool) or not hasattr(got, "__index__"):
            raise RequestError(
                f"priority: got {type(got).__name__}; a whole number is needed, lower first; leave it out for 0",
                param="priority",
            )
        return operator.index(got)
    return int(got)


def _as_salt(got: Any) -> str | None:
    if got is not None and not (isinstance(got, str) and got):
        raise RequestError(
            f"cache_salt: got {got!r}; text of at least one letter is needed; leave it out", param="cache_salt"
        )
    return got


def _as_ids(ids: Any) -> list[int]:
    needed = "a list of token ids is needed"
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise RequestError(f"prompt_token_ids: got {type(ids).__name__}; {needed}", param="prompt_token_ids")
    done = []
    for i in ids:
        if type(i) is not int:
            if isinstance(i, bool) or not hasattr(i, "__index__"):
                shown = type(i).__name__
                raise RequestError(f"prompt_token_ids: got {shown} in it; {needed}", param="prompt_token_ids")
            i = operator.index(i)  # a numpy integer
        done.append(i)
    return done
