"""How many tokens a streamed piece holds at least, by the request and by the server."""

import pytest
from scripted import CHAT, COMPLETE, HI

LONG = {"max_tokens": 30, "return_token_ids": True}


def sizes_of(chunks):
    return [len(c["token_ids"]) for chunk in chunks for c in chunk["choices"] if "token_ids" in c]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize(("own", "servers"), [(7, 1), (2, 7), (None, 7)])
def test_every_piece_but_the_first_and_the_last_has_as_many_tokens_as_asked_for(make_rig, path, own, servers):
    rig = make_rig(stream_interval=servers)
    ask = LONG | ({"messages": HI} if path == CHAT else {"prompt": "hi"})
    sizes = sizes_of(rig.stream(path, stream_interval=own, **ask))
    assert sum(sizes) == 30
    assert all(size >= 7 for size in sizes[1:-1])
    assert len(sizes) <= 6
    whole = rig.post(path, ask | {"seed": 3, "ignore_eos": True, "stream_interval": own})
    assert len(whole["choices"][0]["token_ids"]) == 30
    rig.assert_idle()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_an_interval_of_no_token_is_refused(rig, wrong):
    error = rig.refused(CHAT, {"messages": HI, "stream": True, "stream_interval": wrong})
    assert error["param"] == "stream_interval"
