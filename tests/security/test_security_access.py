"""Who may ask, what leaves the server, and what one user can learn of another."""

import hashlib
import hmac
import json
import logging
import os
import random
import re
import socket
import stat

import pytest
from kit import GatedRunner, Rig, wait_until
from source_tree import python_files, text_of

from tiercel.api import errors
from tiercel.api.http import auth, openapi
from tiercel.api.http.app import DOCS_ROUTES, NOT_BUILT, PAGE_ROUTES, ROUTES
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError
from tiercel.kv.page_keys import extend, root_key

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
OPEN = {"/health", "/ping", "/ready", "/version"}
EVERY = [
    (method, re.sub(r"\{[^}]*\}", "x", path))
    for methods, path, _ in (*ROUTES, *DOCS_ROUTES, *PAGE_ROUTES)
    for method in methods.split()
] + [("POST", path) for path in NOT_BUILT]


@pytest.fixture(scope="module")
def guarded():
    rig = Rig(settings={"api_keys": ("the-key", "another")})
    yield rig
    rig.close()


@pytest.mark.parametrize("host", ["evil/health", "x/health?", "x#/health", "health", "localhost:1/../health", ""])
def test_CVE_2026_48746_the_path_is_the_one_that_was_sent(guarded, host):
    headers = {"host": host, "x-forwarded-host": host, "x-original-url": "/health", "x-forwarded-prefix": "/health"}
    for path in ("/v1/models", "//health/../v1/models", "/v1/models?x=/health", "/%76%31/models"):
        assert guarded.ask("GET", path, headers=headers).status_code in (401, 404)
    assert guarded.ask("GET", "/v1/models", headers=headers).status_code == 401
    assert "request.url" not in "".join(text_of(path) for path in python_files("src/tiercel/api"))


def test_CVE_2025_59425_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    same = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    rig = Rig(settings={"api_keys": ("one", "two", "three")})
    try:
        for shown, status in (("one", 200), ("three", 200), ("on", 401), ("o" * 5000, 401)):
            compared.clear()
            assert rig.ask("GET", "/v1/models", headers={"x-api-key": shown}).status_code == status
            # All of them each time, as digests of one length.
            assert [b for _, b in compared] == [hashlib.sha256(k).digest() for k in (b"one", b"two", b"three")]
            assert all(len(a) == 32 for a, _ in compared)
    finally:
        rig.close()


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_DESIGN_DENY_BY_DEFAULT_every_route_asks_for_a_key(guarded, method, path):
    status = guarded.ask(method, path).status_code
    assert status == (200 if path in OPEN else 401)
    if path != "/":
        for other in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert path in OPEN or guarded.ask(other, path).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/server_info"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/start_profile", "/abort_requests"),
        *("/invocations", "/scale_elastic_ep", "/shutdown", "/api/pull", "/debug"),
    ],
)
def test_GO_2025_4251_no_route_manages_the_server(rig, path):
    for method in ("GET", "POST", "DELETE"):
        assert rig.ask(method, path).status_code == 404


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://169.254.169.254/latest", "http://a\\@127.0.0.1/", "file:///etc/passwd"),
        *("data:image/png;base64,AAAA", "ftp://x/", "http://[::1]/", "gopher://x"),
    ],
)
def test_CVE_2025_6242_no_address_of_a_request_is_fetched(rig, monkeypatch, url):
    def fetched(*args, **kwargs):
        raise AssertionError("it was fetched")

    for kind, part in (("image_url", {"url": url}), ("audio_url", {"url": url}), ("video_url", {"url": url})):
        content = [{"type": "text", "text": "x"}, {"type": kind, kind: part}]
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", fetched)
            patch.setattr(socket, "create_connection", fetched)
            rig.refused(CHAT, {"messages": [{"role": "user", "content": content}]})
            image = [{"type": "image", "source": {"type": "url", "url": url}}]
            rig.post("/v1/messages", {"messages": [{"role": "user", "content": image}], "max_tokens": 1}, 400)


def test_CVE_2025_25183_pages_are_found_by_digests_that_nobody_can_make_collide():
    root = root_key("weights", "float16", 16)
    one, two = extend(root, list(range(32)), 16)
    assert one == hashlib.sha256(root + bytes(b for i in range(16) for b in (i, 0, 0, 0))).digest()
    assert two != extend(root, list(range(16, 32)), 16)[0]  # what stands before counts
    others = [
        root_key("weights2", "float16", 16),
        root_key("weights", "float32", 16),
        root_key("weights", "float16", 8),
    ]
    assert len({root, *others, root_key("weights", "float16", 16, salt="s")}) == 5


def test_CVE_2025_46570_no_tenant_sees_by_time_what_another_asked(make_rig):
    rig = make_rig()
    prompt = "a secret of one tenant, long enough for several pages of the cache"

    def n_cached(**fields):
        usage = rig.complete(prompt=prompt, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert n_cached(cache_salt="one") == 0
    assert n_cached(cache_salt="one") > 0
    assert n_cached(cache_salt="two") == 0
    assert n_cached() == 0
    assert n_cached(cache_salt="one") > 0


@pytest.mark.parametrize("is_async", [True, False])
def test_GHSA_v97p_wpxp_px84_a_slot_that_is_used_again_brings_nothing_of_before(make_rig, is_async):
    alone = make_rig(max_num_seqs=1, limits={"n_slots": 1}, async_scheduling=is_async, enable_prefix_caching=False)
    want = {p: alone.complete(prompt=p, max_tokens=9)["choices"][0]["text"] for p in ("second", "third")}
    rig = make_rig(
        runner=GatedRunner,
        max_num_seqs=2,
        limits={"n_slots": 2},
        async_scheduling=is_async,
        enable_prefix_caching=False,
    )
    first = [rig.client.submit("first") for _ in range(2)]
    rig.runner.let(2)
    wait_until(lambda: rig.core.snapshot.n_total_generation_tokens >= 2)
    for handle in first:
        handle.close()  # with steps of theirs under way
    rig.runner.open()
    for _ in range(3):
        for prompt, text in want.items():
            assert rig.complete(prompt=prompt, max_tokens=9)["choices"][0]["text"] == text
    rig.assert_idle()


# What no message may hold: addresses, objects, files of this machine, lines of code.
LEAKS = re.compile(
    r" at 0x|<[a-z_.]+ object|<class|<function|Traceback|File \"|\.py\b|site-packages|/root/|/home/|/usr/"
)
_VALUES = (None, True, -1, 2**70, 1e300, "", "x" * 200, [], [[]], {}, {"type": 5}, [{"a": {}}], "\x00", [None], HI)


def fuzz_body(draw, names):
    names = draw.sample(names, draw.randint(0, 3))
    base = draw.choice([{}, {"messages": HI}, {"prompt": "x"}, {"tokens": [1]}, {"messages": HI, "max_tokens": 3}])
    return base | {name: draw.choice(_VALUES) for name in names}


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_CVE_2026_22778_no_error_of_any_route_leaks(rig, method, path):
    draw = random.Random(f"{method} {path}")
    kind = openapi.BODIES.get(path)
    names = [*(kind.__struct_fields__ if kind else ()), "nonsense", "tools", "response_format", "chat_template_kwargs"]
    bodies = [json.dumps(fuzz_body(draw, names)).encode() for _ in range(30)]
    bodies += [b"", b"{", b"\xff", b"[" * 3000, b"null", b'{"a": <object object at 0x7f3a12345678>}']
    is_anthropic = path.startswith("/v1/messages")
    for body in bodies:
        headers = {"content-type": draw.choice(["application/json"] * 9 + ["text/plain"])}
        response = rig.ask(method, path, content=body, headers=headers)
        if response.status_code < 400:
            continue
        assert response.status_code != 500, body
        told = response.json()
        assert set(told) == ({"type", "error"} if is_anthropic else {"error"})
        assert not LEAKS.search(json.dumps(told)), told
        assert len(told["error"]["message"]) <= 2100


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/v1/messages", "/tokenize", "/detokenize"])
def test_CVE_2026_22778_what_nobody_foresaw_is_told_without_its_words(make_rig, monkeypatch, path):
    rig = make_rig()

    def fails(*args, **kwargs):
        raise ValueError(f"cannot identify image file <_io.BytesIO object at {hex(id(rig))}> in /usr/lib/secret.py")

    for name in ("encode", "decode"):
        monkeypatch.setattr(f"tiercel.text.tokenizer.Tokenizer.{name}", fails)
    body = {"messages": HI, "max_tokens": 1} if "messages" in path or path == CHAT else {"prompt": "x"}
    response = rig.ask("POST", path, json={"tokens": [1]} if path == "/detokenize" else body)
    assert response.status_code == 500
    assert not LEAKS.search(response.text)
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("bad <_io.BytesIO object at 0x7f3a12345678>", "bad <_io.BytesIO object>"),
        ("in /usr/lib/python3/x.py line 5", "in <path> line 5"),
        ("C:\\Users\\me\\model.gguf is bad", "<path> is bad"),
        ("pointer 0xdeadbeef00", "pointer"),
    ],
)
def test_CVE_2026_22778_the_one_formatter_takes_out_addresses_and_paths(message, told):
    assert errors.cleaned(message).replace("  ", " ").strip() == told


def test_keys_reach_no_log(caplog, capsys):
    key = "sk-very-secret"
    with caplog.at_level(logging.DEBUG):
        rig = Rig(settings={"api_keys": (key,)})
        try:
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-api-key": f"{key}x"}):
                for path in (CHAT, COMPLETE, "/nowhere", "/v1/models"):
                    rig.ask("POST", path, json={"prompt": "x", "temperature": 9}, headers=headers)
        finally:
            rig.close()
    said = capsys.readouterr()
    assert key not in caplog.text + said.out + said.err
    assert key not in repr(rig.settings)


def test_beyond_this_machine_a_key_is_needed_or_a_word():
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="no key"):
            ServerSettings(served_names=("a",), host=host)
    assert ServerSettings(served_names=("a",)).host == "127.0.0.1"


def test_what_is_kept_on_disk_is_this_users_alone(tmp_path):
    from tiercel.text import compiled

    mask = os.umask(0)
    try:
        compiled._store(tmp_path / "cache" / "a.tokenizer", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "cache" / "a.tokenizer").stat().st_mode) == 0o600
