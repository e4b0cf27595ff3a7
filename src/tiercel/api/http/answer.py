"""What every answer about generated text has: its envelope and its count of tokens. Knows no shape of a choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tiercel import __version__
from tiercel.api.http.schema import Generation

if TYPE_CHECKING:
    from starlette.requests import Request

    from tiercel.api.http.pooling import Pooling
    from tiercel.api.http.running import Running
    from tiercel.api.http.service import Service
    from tiercel.api.http.settings import ServerSettings
    from tiercel.protocol.outputs import RequestOutput

_encoder: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Tally:
    """Tokens of one answer. Written by whoever reads the outputs."""

    n_prompt: int
    n_cached: int = 0
    n_completion: int = 0
    n_reasoning: int | None = None  # of those, where reasoning is told apart
    n_by_choice: dict[int, int] = field(default_factory=dict)
    _cached_of: dict[int, int] = field(default_factory=dict)
    _by_tier_of: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, prompt_idx: int, output: "RequestOutput", n_per_prompt: int) -> None:
        """Count what is new in an output."""
        if output.num_cached_tokens is not None:
            self._cached_of[prompt_idx] = output.num_cached_tokens
            self.n_cached = sum(self._cached_of.values())
            if output.cached_by_tier is not None:
                self._by_tier_of[prompt_idx] = output.cached_by_tier
        for one in output.outputs:
            choice = prompt_idx * n_per_prompt + one.index
            self.n_by_choice[choice] = self.n_by_choice.get(choice, 0) + len(one.token_ids)
            self.n_completion += len(one.token_ids)

    @property
    def has_tiers(self) -> bool:
        """Whether the engine has tiers below its page pool."""
        return bool(self._by_tier_of)

    def by_tier(self) -> dict[str, int]:
        """Say how many of the cached tokens each tier gave; the rest was in the page pool."""
        given: dict[str, int] = {}
        for one in self._by_tier_of.values():
            for label, n in one.items():
                given[label] = given.get(label, 0) + n
        return {"0:pool": self.n_cached - sum(given.values())} | given

    def usage(self) -> dict[str, Any]:
        """Give OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_completion,
            "total_tokens": self.n_prompt + self.n_completion,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }
        if self.has_tiers:
            usage["prompt_tokens_details"]["cached_tokens_by_tier"] = self.by_tier()
        if self.n_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.n_reasoning}
        return usage


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around the choices of an answer, and around those of each of its chunks."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str | None
    _head: bytes = field(init=False, repr=False)  # what is the same in each chunk of a stream, encoded once

    def __post_init__(self) -> None:
        object.__setattr__(self, "_head", msgspec.json.encode(self._before())[:-1])

    def around(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Give an answer with these choices; what is None in `more` is left out."""
        return (
            self._before() | {"choices": choices} | {name: value for name, value in more.items() if value is not None}
        )

    def frame(self, choices: Sequence[Any], **more: Any) -> bytes:
        """Give a server-sent event of `around`'s answer."""
        rest: dict[str, Any] = {"choices": choices}
        for name, value in more.items():
            if value is not None:
                rest[name] = value
        return b"data: " + self._head + b"," + _encoder.encode(rest)[1:] + b"\n\n"

    def _before(self) -> dict[str, Any]:
        before: dict[str, Any] = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        if self.fingerprint is not None:
            before["system_fingerprint"] = self.fingerprint
        return before


def envelope(service: "Service", request_id: str, ask: Generation, kind: str) -> Envelope:
    """Make the envelope of an answer. `kind` is its object's name when it is whole."""
    is_chat = kind.startswith("chat")
    return Envelope(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        object=f"{kind}.chunk" if ask.stream and is_chat else kind,
        created=int(service.clock()),
        model=service.settings.model_id,
        fingerprint=_fingerprint(service),
    )


def _fingerprint(service: "Service") -> str | None:
    """Give what tells clients that the same request may be answered in other numbers."""
    settings, digest = service.settings, service.engine.fingerprint
    given = {"full": f"tiercel-{__version__}-{digest}", "hash": digest, "custom": settings.fingerprint, "none": None}
    return given[settings.fingerprint_mode]


def has_usage(ask: Generation, settings: "ServerSettings") -> tuple[bool, bool]:
    """Say whether a stream tells its usage at its end, and in each chunk."""
    options, is_forced = ask.stream_options, settings.enable_force_include_usage
    return (
        is_forced or bool(options and options.include_usage),
        is_forced or bool(options and options.continuous_usage_stats),
    )


def writes_ids(ask: Generation, settings: "ServerSettings") -> bool:
    """Say whether tokens are written as their ids."""
    asked = ask.return_tokens_as_token_ids
    return settings.return_tokens_as_token_ids if asked is None else asked


def request_metrics(settings: "ServerSettings", running: "Running") -> dict[str, float] | None:
    """Say where an answer's time went, where the server tells it and one sequence was all of it; times not reached are
    left out.
    """
    if not settings.enable_per_request_metrics or len(running.handles) != 1:
        return None
    (summary,) = running.summaries()
    if summary.params.n != 1:
        return None
    at, n_tokens = summary.metrics, summary.n_output_tokens
    told: dict[str, float | None] = {}
    if at.first_scheduled_s is not None:
        told["queue_time_ms"] = at.first_scheduled_s - at.arrival_s
    if at.first_token_s is not None and at.last_token_s is not None:
        decode_s = at.last_token_s - at.first_token_s
        told["time_to_first_token_ms"] = at.first_token_s - at.arrival_s
        told["generation_time_ms"] = at.last_token_s - (at.first_scheduled_s or at.arrival_s)
        told["mean_itl_ms"] = decode_s / (n_tokens - 1) if n_tokens > 1 else None
    in_ms = {name: round(1000 * value, 3) for name, value in told.items() if value is not None}
    if in_ms.get("generation_time_ms"):
        in_ms["tokens_per_second"] = round(1000 * n_tokens / in_ms["generation_time_ms"], 3)
    return in_ms


def request_id_of(request: "Request", ask: "Generation | Pooling") -> str:
    """Give a request's id: its header's, else its body's, else the server's own."""
    state = request.scope["state"]
    own: str = state["request_id"]
    if state["has_own_id"] or not ask.request_id:
        return own
    return ask.request_id if is_good_id(ask.request_id) else own


def is_good_id(text: str) -> bool:
    """Whether a client's id may be repeated in headers and logs."""
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text
