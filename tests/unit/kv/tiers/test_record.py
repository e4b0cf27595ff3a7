"""A record is believed only whole, and only as the object that it is."""

from dataclasses import replace

import pytest

from tiercel.base.errors import ConfigError
from tiercel.kv.tiers.identity import ObjectGroup, TierIdentity, object_key
from tiercel.kv.tiers.record import InvalidRecord, RecordFormat, RecordHead
from tiercel.testing.tier_kit import IDENTITY, PAGES, STATES, body_of, key_of

FORMAT = RecordFormat(IDENTITY)


def record(i=1, group_idx=STATES, fmt=FORMAT):
    return fmt.header(RecordHead(key_of(i), group_idx, 7, True, 1_900_000_000), body_of(i, group_idx)) + body_of(
        i, group_idx
    )


@pytest.mark.parametrize("group_idx", [PAGES, STATES])
def test_a_record_gives_back_its_object(group_idx):
    whole = record(1, group_idx)
    assert len(whole) == FORMAT.record_bytes(group_idx)
    assert FORMAT.open(whole, key_of(1), group_idx) == body_of(1, group_idx)
    assert FORMAT.read_header(whole) == RecordHead(key_of(1), group_idx, 7, True, 1_900_000_000)


def test_no_flipped_bit_passes():
    whole = record()
    for i in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[i // 8] ^= 1 << i % 8
        with pytest.raises(InvalidRecord):
            FORMAT.open(damaged, key_of(1), STATES)


def test_no_truncated_or_longer_record_passes():
    whole = record()
    for n in range(len(whole)):
        with pytest.raises(InvalidRecord):
            FORMAT.open(whole[:n], key_of(1), STATES)
    with pytest.raises(InvalidRecord):
        FORMAT.open(whole + b"\0", key_of(1), STATES)


def test_another_objects_record_does_not_pass():
    with pytest.raises(InvalidRecord, match="another object"):
        FORMAT.open(record(2), key_of(1), STATES)
    with pytest.raises(InvalidRecord, match="another object"):
        FORMAT.open(record(1, PAGES), key_of(1), STATES)


def test_a_body_under_another_objects_header_does_not_pass():
    n = FORMAT.header_bytes
    with pytest.raises(InvalidRecord, match="body's checksum"):
        FORMAT.open(record(1)[:n] + record(2)[n:], key_of(1), STATES)


def with_group(**changes):
    return replace(IDENTITY, groups=(IDENTITY.groups[0], replace(IDENTITY.groups[1], **changes)))


OTHERS = {
    "model": replace(IDENTITY, model_digest="other"),
    "weights": replace(IDENTITY, weights_digest="other"),
    "page size": replace(IDENTITY, page_size_tokens=32),
    "dtype": with_group(dtype="float16"),
    "scales": with_group(scales="float16 a token"),
    "layout": with_group(layout=("dim", "layer")),
    "counts": with_group(counts=(8, 2)),
    "name": with_group(name="other"),
    "groups": replace(IDENTITY, groups=(IDENTITY.groups[1], IDENTITY.groups[0])),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_record_of_another_identity_does_not_pass(other):
    fmt = RecordFormat(other)
    assert other.name() != IDENTITY.name()
    group_idx = 0 if other is OTHERS["groups"] else STATES
    with pytest.raises(InvalidRecord):
        FORMAT.open(
            record(1, STATES)[:0] + fmt.header(RecordHead(key_of(1), group_idx, 0), body_of(1, STATES)),
            key_of(1),
            STATES,
        )


def test_an_identity_without_groups_or_with_two_of_a_name_is_refused():
    with pytest.raises(ConfigError, match="groups"):
        TierIdentity("m", "w", 16, ())
    with pytest.raises(ConfigError, match="groups"):
        TierIdentity("m", "w", 16, IDENTITY.groups[:1] * 2)
    with pytest.raises(ConfigError, match="group 'x'"):
        ObjectGroup("x", "float16", "none", ("layer",), (1, 2), 4)


def test_a_snapshot_and_a_page_after_the_same_tokens_have_different_keys():
    keys = {object_key(key_of(1), name) for name in (None, "state", "window")}
    assert len(keys) == 3
    assert object_key(key_of(1), None) == key_of(1)
