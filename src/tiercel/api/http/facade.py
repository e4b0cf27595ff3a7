"""What the server needs of an engine, as one value; whoever builds the engine fills it. Knows no model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.engine.client import EngineClient
    from tiercel.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacade:
    """A running engine.

    tokenizer            None: prompts and answers are token ids only
    fingerprint          a short digest of all that decides the model's numbers
    generation_defaults  in the form of generation_config.json: what a request that is silent about it gets
    cache_facts          labels of the metric cache_config_info: page size, pages, element type
    close                ends the engine; called once, last
    """

    client: "EngineClient"
    tokenizer: "Tokenizer | None"
    fingerprint: str = ""
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    cache_facts: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's logits."""
        return self.client.core.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence, prompt and output."""
        return self.client.max_len_tokens
