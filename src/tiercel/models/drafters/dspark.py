"""DSpark: the backbone of `block`, a head that adds to each row's logits a bias by the token before, and a confidence.

With `sample_from_anchor` the last token's row foretells the first draft, so that `block_size` rows make as many drafts.
B(x) = W2 W1[x] (vanilla); W2 (sigmoid(gate [h; W1[x]]) * W1[x]) (gated); or W2 of a recurrent cell's output (rnn). The
confidence of draft k, sigmoid(w [h_k; W1[x_{k-1}]] + b), estimates its chance if those before it come. Source: Cheng et
al. 2026 (arXiv:2607.05147); names as its repository and speculators have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from tiercel.models.drafters.block import BlockConfig, BlockDrafter, read_block
from tiercel.models.drafters.config import WHERE
from tiercel.models.drafters.interface import HeadSpec, Shapes
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model

_HEADS = ("vanilla", "gated", "rnn")
_CONFIDENCE = "confidence_head.proj"


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """What the head's config says. `topk` 0: the bias is added to all of a row's logits."""

    kind: Literal["vanilla", "gated", "rnn"]
    rank: int
    topk: int
    has_confidence: bool
    confidence_reads_markov: bool
    biased: frozenset[str]
    """Which of its matrices have a bias."""


class DSpark(BlockDrafter):
    """DSpark."""

    architecture: ClassVar[str] = "dspark"

    def __init__(self, config: BlockConfig, markov: MarkovHead) -> None:
        super().__init__(config)
        self.markov = markov

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> Self:
        """Read a config in one form; see `read_block`."""
        fields = ConfigFields(config, WHERE)
        # Speculators' configs leave the flag out and mean rows as DFlash has them; the paper's code has no flag.
        is_speculators = fields.has("speculators_model_type")
        found = read_block(fields, target, names, sliding_is_causal=True, anchor_default=not is_speculators)
        kind = fields.raw("markov_head_type")
        kind = "vanilla" if kind is None else kind
        if kind not in _HEADS:
            raise fields.refused("markov_head_type", kind, f"the known heads are {', '.join(_HEADS)}")
        topk = fields.size("dspark_draft_topk") if fields.raw("dspark_draft_topk") else 0
        if topk > found.layers.draft_vocab_size:
            raise fields.broken("dspark_draft_topk", topk, f"at most draft_vocab_size {found.layers.draft_vocab_size}")
        modules = ("markov_head.gate_proj", "markov_head.joint_proj", _CONFIDENCE)
        markov = MarkovHead(
            kind=cast('Literal["vanilla", "gated", "rnn"]', kind),
            rank=fields.size("markov_rank", 256),
            topk=topk,
            has_confidence=fields.flag("enable_confidence_head", default=f"{_CONFIDENCE}.weight" in names),
            confidence_reads_markov=fields.flag("confidence_head_with_markov", default=True),
            biased=frozenset(module for module in modules if f"{module}.bias" in names),
        )
        fields.raw("confidence_head_alpha")  # of training
        fields.finish()
        return cls(found, markov)

    def head_weights(self) -> Shapes:
        """Return the shapes of the head's tensors."""
        n, m = self.config.layers, self.markov
        shapes: Shapes = {
            "markov_head.markov_w1.weight": (n.vocab_size, m.rank),
            "markov_head.markov_w2.weight": (n.draft_vocab_size, m.rank),
        }
        if m.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (m.rank, n.hidden_size + m.rank)
        if m.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * m.rank, 2 * m.rank + n.hidden_size)
        if m.has_confidence:
            width = n.hidden_size + (m.rank if m.confidence_reads_markov else 0)
            shapes[f"{_CONFIDENCE}.weight"] = (1, width)
        for name, shape in list(shapes.items()):
            module = name.removesuffix(".weight")
            if module in m.biased:
                shapes[f"{module}.bias"] = shape[:1]
        return {f"draft.{name}": shape for name, shape in shapes.items()}

    def head(self) -> HeadSpec:
        """Return the Markov head."""
        n, m = self.config.layers, self.markov
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
        own = self.head_weights()
        return HeadSpec(
            kind="markov",
            n_vocab=n.draft_vocab_size,
            markov=m.kind,
            rank=m.rank,
            topk=m.topk,
            weights={role: f"draft.{name}" for role, name in roles.items() if f"draft.{name}" in own},
            confidence_reads_markov=m.has_confidence and m.confidence_reads_markov,
            d2t="draft.d2t" if n.has_d2t else None,
        )
