"""What a request to a pooling model asks for, and what it gets, under vLLM's names."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec

from tiercel.base.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

_T = TypeVar("_T")
_TASKS = ("embed", "classify", "token_embed", "token_classify")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a text is pooled. None everywhere means as the model says.

    task: embed (a vector of the text), classify (numbers of its labels), token_embed and token_classify (the same of
    each token). dimensions: the length that an embedding is cut to, of a model that was trained for that.
    use_activation: whether embeddings get length one, or logits become probabilities. truncate_prompt_tokens: the most
    tokens that are read, those that frame a text included; -1: what fits. truncation_side: where a longer text is
    cut.

    Raises:
        RequestError: a value is out of its range; `param` names it.
    """

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in _TASKS:
            raise refused("task", f"got {self.task!r}; one of {', '.join(_TASKS)} is needed")
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least or value == 0):
                raise refused(name, f"got {value!r}; {'-1, or ' if least < 0 else ''}1 or more is needed")
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise refused("use_activation", f"got {self.use_activation!r}; true or false is needed")
        if self.truncation_side not in (None, "left", "right"):
            raise refused("truncation_side", f"got {self.truncation_side!r}; left or right is needed")


def refused(param: str, why: str) -> RequestError:
    """Return the error for a field."""
    return RequestError(f"{param}: {why}", param=param)


@dataclass(slots=True)
class PoolingOutput:
    """A text's numbers as they are, float32: [W], or [T, W] for a task of tokens."""

    data: "np.ndarray"


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number for each label, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_T]):
    """A pooled text."""

    request_id: str
    outputs: _T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def cosine(a: "np.ndarray", b: "np.ndarray") -> float:
    """Return the cosine of two vectors; 0 when one has no length."""
    import numpy as np

    x, y = a.astype(np.float64), b.astype(np.float64)
    length = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum() / length) if length > 0.0 else 0.0
