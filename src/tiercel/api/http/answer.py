"""What every answer about generated text has: its envelope and its count of tokens. Knows no shape of a choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiercel import __version__
from tiercel.api.http.schema import Generation

if TYPE_CHECKING:
    from starlette.requests import Request

    from tiercel.api.http.service import Service
    from tiercel.protocol.outputs import RequestOutput


@dataclass(slots=True)
class Tally:
    """Tokens of one answer. Written by whoever reads the outputs."""

    n_prompt: int
    n_cached: int = 0
    n_completion: int = 0
    n_reasoning: int | None = None  # of those, where reasoning is told apart
    n_by_choice: dict[int, int] = field(default_factory=dict)
    _cached_of: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_idx: int, output: "RequestOutput", n_per_prompt: int) -> None:
        """Count what is new in an output."""
        if output.num_cached_tokens is not None:
            self._cached_of[prompt_idx] = output.num_cached_tokens
            self.n_cached = sum(self._cached_of.values())
        for one in output.outputs:
            choice = prompt_idx * n_per_prompt + one.index
            self.n_by_choice[choice] = self.n_by_choice.get(choice, 0) + len(one.token_ids)
            self.n_completion += len(one.token_ids)

    def usage(self) -> dict[str, Any]:
        """Give OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_completion,
            "total_tokens": self.n_prompt + self.n_completion,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }
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
    fingerprint: str

    def around(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Give an answer with these choices; what is None in `more` is left out."""
        answer = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return answer | {name: value for name, value in more.items() if value is not None}


def envelope(service: "Service", request_id: str, ask: Generation, kind: str) -> Envelope:
    """Make the envelope of an answer. `kind` is its object's name when it is whole."""
    is_chat = kind.startswith("chat")
    return Envelope(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        object=f"{kind}.chunk" if ask.stream and is_chat else kind,
        created=int(service.clock()),
        model=service.settings.model_id,
        fingerprint=f"tiercel-{__version__}-{service.engine.fingerprint}",
    )


def request_id_of(request: "Request", ask: Generation) -> str:
    """Give a request's id: its header's, else its body's, else the server's own."""
    state = request.scope["state"]
    own: str = state["request_id"]
    if state["has_own_id"] or not ask.request_id:
        return own
    return ask.request_id if is_good_id(ask.request_id) else own


def is_good_id(text: str) -> bool:
    """Whether a client's id may be repeated in headers and logs."""
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text
