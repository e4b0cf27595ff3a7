"""What a request may say about tiers: read strictly, and refused by name."""

import pytest

from tiercel.base.errors import RequestError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.tiers import CacheHint, KvTransferParams, TierKindName


def test_transfer_params_are_read_from_what_json_gives():
    got = SamplingParams(
        kv_transfer_params={"kv_load_tiers": [{"medium": "STORAGE"}, {"locality": "local"}], "max_offload_tokens": 5}
    ).kv_transfer_params
    assert got == KvTransferParams((TierKindName("storage", None), TierKindName(None, "local")), 5)


def test_no_tier_and_every_tier_are_told_apart():
    assert SamplingParams(kv_transfer_params={"kv_load_tiers": []}).kv_transfer_params == KvTransferParams(())
    assert SamplingParams(kv_transfer_params={}).kv_transfer_params == KvTransferParams(None)


def test_a_hint_is_read_from_what_json_gives():
    assert SamplingParams(cache_hint={"pin": True, "ttl_s": 5}).cache_hint == CacheHint(pin=True, ttl_s=5.0)
    assert SamplingParams(cache_hint={}).cache_hint == CacheHint()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True}, "do_remote_prefill.*kv_load_tiers, max_offload_tokens"),
        ("kv_transfer_params", [], "an object"),
        ("kv_transfer_params", {"max_offload_tokens": -1}, "0 and up"),
        ("kv_transfer_params", {"max_offload_tokens": True}, "a number of tokens"),
        ("kv_transfer_params", {"kv_load_tiers": "storage"}, "a list"),
        ("kv_transfer_params", {"kv_load_tiers": [{"medium": "tape"}]}, r"kv_load_tiers\[0\]\.medium.*cpu, storage"),
        ("kv_transfer_params", {"kv_load_tiers": [{"tier": 1}]}, "medium, locality"),
        ("cache_hint", {"pinned": True}, "pinned.*pin, ttl_s"),
        ("cache_hint", {"pin": 1}, "true or false"),
        ("cache_hint", {"pin": True, "ttl_s": 0}, "above 0"),
        ("cache_hint", {"pin": True, "ttl_s": float("nan")}, "above 0"),
        ("cache_hint", {"ttl_s": 5}, "pin true"),
    ],
)
def test_what_is_none_of_it_is_refused_by_name(name, value, words):
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
