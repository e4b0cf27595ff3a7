"""DFlash: the backbone of `block` and no more; each row's best token is its draft.

`block_size` is 1 + drafts: masks foretell their own positions, and the last token's row nothing, unless
`sample_from_anchor` says otherwise. Source: Chen et al. 2026 (arXiv:2602.06036); z-lab's checkpoints.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tiercel.models.drafters.block import BlockDrafter, read_block
from tiercel.models.drafters.config import WHERE
from tiercel.models.drafters.interface import HeadSpec
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model


class DFlash(BlockDrafter):
    """DFlash."""

    architecture: ClassVar[str] = "dflash"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> Self:
        """Read a config in one form; see `read_block`."""
        fields = ConfigFields(config, WHERE)
        found = read_block(fields, target, names, sliding_is_causal=True, anchor_default=False)
        fields.finish()
        return cls(found)

    def head(self) -> HeadSpec:
        """Return a plain head."""
        n = self.config.layers
        return HeadSpec(kind="plain", n_vocab=n.draft_vocab_size, d2t="draft.d2t" if n.has_d2t else None)
