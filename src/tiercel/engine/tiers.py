"""What a sequence asks of the tiers, from what its request says. Knows no pool."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercel.engine.request import Sequence
    from tiercel.kv.tiers.manager import PageTiers
    from tiercel.kv.tiers.promotion import Ask


def ask_of(sequence: "Sequence", tiers: "PageTiers", page_size_tokens: int) -> "Ask":
    """Begin a sequence's ask."""
    from tiercel.kv.tiers.promotion import Ask  # an engine without tiers imports none of this

    wishes = sequence.tiers
    if wishes is None:
        return Ask()
    return Ask(
        load_from=None if wishes.load_kinds is None else tiers.places(wishes.load_kinds),
        n_store_pages=None if wishes.n_store_tokens is None else wishes.n_store_tokens // page_size_tokens,
        stores_now=wishes.hint is not None and wishes.hint.pin,
    )
