"""The head of DSpark: what it adds to each row's logits by the token before, and how sure it is of a draft.

B(x) = W2 W1[x] (vanilla); W2 (sigmoid(gate [h; W1[x]]) * W1[x]) (gated); or W2 of a recurrent cell's output (rnn). The
confidence of draft k, sigmoid(w [h_k; W1[x_{k-1}]] + b), estimates its chance if those before it come. Source: Cheng et
al. 2026 (arXiv:2607.05147); names as its repository and speculators have them.
"""

from dataclasses import dataclass
from typing import Literal, cast

from tiercel.models.drafters.interface import HeadSpec, Shapes
from tiercel.models.fields import ConfigFields

_HEADS = ("vanilla", "gated", "rnn")
_CONFIDENCE = "confidence_head.proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovHead:
    """What the head's config says, and the sizes around it. `topk` 0: the bias is added to all of a row's logits."""

    kind: Literal["vanilla", "gated", "rnn"]
    rank: int
    topk: int
    has_confidence: bool
    confidence_reads_markov: bool
    biased: frozenset[str]
    """Which of its matrices have a bias."""
    hidden: int
    vocab: int
    draft_vocab: int

    def weights(self) -> Shapes:
        """Return the shapes of its tensors, by canonical name."""
        shapes: Shapes = {
            "markov_head.markov_w1.weight": (self.vocab, self.rank),
            "markov_head.markov_w2.weight": (self.draft_vocab, self.rank),
        }
        if self.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (self.rank, self.hidden + self.rank)
        if self.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * self.rank, 2 * self.rank + self.hidden)
        if self.has_confidence:
            width = self.hidden + (self.rank if self.confidence_reads_markov else 0)
            shapes[f"{_CONFIDENCE}.weight"] = (1, width)
        for name, shape in list(shapes.items()):
            module = name.removesuffix(".weight")
            if module in self.biased:
                shapes[f"{module}.bias"] = shape[:1]
        return {f"draft.{name}": shape for name, shape in shapes.items()}

    def spec(self, d2t: str | None) -> HeadSpec:
        """Return how drafts are picked; `d2t` as `HeadSpec`'s."""
        roles = {
            "w1": "markov_head.markov_w1.weight",
            "w2": "markov_head.markov_w2.weight",
            "gate": "markov_head.gate_proj.weight",
            "gate_bias": "markov_head.gate_proj.bias",
            "joint": "markov_head.joint_proj.weight",
            "joint_bias": "markov_head.joint_proj.bias",
            "confidence": f"{_CONFIDENCE}.weight",
            "confidence_bias": f"{_CONFIDENCE}.bias",
        }
        own = self.weights()
        return HeadSpec(
            kind="markov",
            n_vocab=self.draft_vocab,
            markov=self.kind,
            rank=self.rank,
            topk=self.topk,
            weights={role: f"draft.{name}" for role, name in roles.items() if f"draft.{name}" in own},
            confidence_reads_markov=self.has_confidence and self.confidence_reads_markov,
            d2t=d2t,
        )


def read_markov(
    fields: ConfigFields, names: frozenset[str], *, hidden: int, vocab: int, draft_vocab: int
) -> MarkovHead:
    """Read the head's fields; `names` are the checkpoint's tensors, as published.

    Raises:
        ModelFileError: a field makes no sense.
        UnsupportedModel: the head is of a kind that is not implemented.
    """
    kind = fields.raw("markov_head_type")
    kind = "vanilla" if kind is None else kind
    if kind not in _HEADS:
        raise fields.refused("markov_head_type", kind, f"the known heads are {', '.join(_HEADS)}")
    topk = fields.size("dspark_draft_topk") if fields.raw("dspark_draft_topk") else 0
    if topk > draft_vocab:
        raise fields.broken("dspark_draft_topk", topk, f"at most draft_vocab_size {draft_vocab}")
    modules = ("markov_head.gate_proj", "markov_head.joint_proj", _CONFIDENCE)
    fields.raw("confidence_head_alpha")  # of training
    return MarkovHead(
        kind=cast('Literal["vanilla", "gated", "rnn"]', kind),
        rank=fields.size("markov_rank", 256),
        topk=topk,
        has_confidence=fields.flag("enable_confidence_head", default=f"{_CONFIDENCE}.weight" in names),
        confidence_reads_markov=fields.flag("confidence_head_with_markov", default=True),
        biased=frozenset(module for module in modules if f"{module}.bias" in names),
        hidden=hidden,
        vocab=vocab,
        draft_vocab=draft_vocab,
    )
