"""What a sequence asks of the tiers, from what its request says. Knows no pool."""

from typing import TYPE_CHECKING

from tiercel.engine.pins import DEFAULT_TTL_S

if TYPE_CHECKING:
    from tiercel.engine.request import Sequence
    from tiercel.kv.tiers.page_tiers import PageTiers
    from tiercel.kv.tiers.promotion import Ask


def ask_of(sequence: "Sequence", tiers: "PageTiers", page_size_tokens: int) -> "Ask":
    """Begin a sequence's ask."""
    from tiercel.kv.tiers.promotion import Ask  # an engine without tiers imports none of this

    ask, wishes, hint = Ask(), sequence.params.kv_transfer_params, sequence.params.cache_hint
    if wishes is not None:
        if wishes.kv_load_tiers is not None:
            ask.load_from = tiers.places([(kind.medium, kind.locality) for kind in wishes.kv_load_tiers])
        if wishes.max_offload_tokens is not None:
            ask.n_store_pages = wishes.max_offload_tokens // page_size_tokens
    if hint is not None and hint.pin:
        ask.stores_now, ask.n_pinned_pages = True, sequence.n_prompt // page_size_tokens
        ask.pin_s = DEFAULT_TTL_S if hint.ttl_s is None else hint.ttl_s
    return ask
