"""DSpark: the backbone of `block`, and the head of `markov`.

With `sample_from_anchor` the last token's row foretells the first draft, so that `block_size` rows make as many drafts.
Source: Cheng et al. 2026 (arXiv:2607.05147); names as its repository and speculators have them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tiercel.models.drafters.block import BlockConfig, BlockDrafter, read_block
from tiercel.models.drafters.config import WHERE
from tiercel.models.drafters.interface import HeadSpec, Shapes
from tiercel.models.drafters.markov import MarkovHead, read_markov
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model


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
        n = found.layers
        markov = read_markov(fields, names, hidden=n.hidden_size, vocab=n.vocab_size, draft_vocab=n.draft_vocab_size)
        fields.finish()
        return cls(found, markov)

    def head_weights(self) -> Shapes:
        """Return the shapes of the head's tensors."""
        return self.markov.weights()

    def head(self) -> HeadSpec:
        """Return the Markov head."""
        return self.markov.spec("draft.d2t" if self.config.layers.has_d2t else None)
