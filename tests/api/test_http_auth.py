"""Who gets in, by path and key."""

import pytest
from kit import error_of

from tiercel.api.http.app import NOT_BUILT, ROUTES
from tiercel.api.http.auth import Keys, read_key_file, route_path
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

KEYS = ("first-key", "clé-two")
OPEN = {"/health", "/ping", "/ready", "/version"}


@pytest.fixture
def guarded(make_rig):
    return make_rig(settings={"api_keys": KEYS})


def paths():
    listed = [(methods.split()[0], path.replace("{name:path}", "tiny")) for methods, path, _ in ROUTES]
    return [*listed, *(("POST", path) for path in NOT_BUILT), ("GET", "/nothing"), ("GET", "/docs")]


@pytest.mark.parametrize(("method", "path"), paths())
def test_every_path_but_the_open_ones_asks_for_a_key(guarded, method, path):
    response = guarded.ask(method, path)
    if path in OPEN:
        assert response.status_code == 200
        return
    assert response.status_code == 401
    if path.startswith("/v1/messages"):
        assert response.json()["error"]["type"] == "authentication_error"
    else:
        assert error_of(response.json(), 401)["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.ask(method, path, headers={"x-api-key": KEYS[0]}).status_code != 401


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ({"authorization": "Bearer first-key"}, True),
        ({"authorization": "bearer first-key"}, True),
        ({"authorization": "BEARER   first-key "}, True),
        ({"authorization": "Bearer clé-two".encode()}, True),
        ({"x-api-key": "first-key"}, True),
        ({"x-api-key": "wrong", "authorization": "Bearer first-key"}, True),
        ({}, False),
        ({"authorization": "first-key"}, False),
        ({"authorization": "Basic first-key"}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer first"}, False),
        ({"authorization": "Bearer first-key2"}, False),
        ({"authorization": "Bearer FIRST-KEY"}, False),
        ({"x-api-key": ""}, False),
        ({"cookie": "key=first-key"}, False),
    ],
)
def test_a_key_is_known_exactly(guarded, headers, is_in):
    assert guarded.ask("GET", "/v1/models", headers=headers).status_code == (200 if is_in else 401)


def test_a_path_rebuilt_from_the_host_header_opens_nothing(guarded):
    headers = {"host": "evil/health?"}
    assert guarded.ask("GET", "/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/../v1/models", "/HEALTH", "/v1/models;/health"])
def test_a_path_that_only_looks_open_is_guarded(path):
    keys = Keys(KEYS, has_open_metrics=False)
    assert keys.owner_of({"path": path, "headers": []}) is None


def test_the_prefix_the_server_is_mounted_under_is_taken_off_once():
    assert route_path({"path": "/api/health", "root_path": "/api"}) == "/health"
    assert route_path({"path": "/apihealth", "root_path": "/api"}) == "/apihealth"
    assert route_path({"path": "/v1/models", "root_path": ""}) == "/v1/models"


def test_metrics_are_open_only_when_told(make_rig, guarded):
    assert guarded.ask("GET", "/metrics").status_code == 401
    scraped = make_rig(settings={"api_keys": KEYS, "has_open_metrics": True})
    assert scraped.ask("GET", "/metrics").status_code == 200
    assert scraped.ask("GET", "/metrics/").status_code == 200
    assert scraped.ask("GET", "/v1/models").status_code == 401


def test_without_keys_everybody_may_ask(rig):
    assert rig.ask("GET", "/v1/models").status_code == 200


def test_beyond_this_machine_a_key_or_a_word_is_needed():
    with pytest.raises(ConfigError, match="no key"):
        ServerSettings(served_names=("a",), host="0.0.0.0")
    ServerSettings(served_names=("a",), host="0.0.0.0", api_keys=("k",))
    ServerSettings(served_names=("a",), host="0.0.0.0", is_insecure=True)
    with pytest.raises(ConfigError, match="empty key"):
        ServerSettings(served_names=("a",), api_keys=(" ",))


def test_keys_are_never_shown():
    assert "secret" not in repr(ServerSettings(served_names=("a",), api_keys=("secret",)))


def test_keys_come_from_a_file_one_a_line(make_rig, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst-key\n\n  second-key  \r\n")
    keys = read_key_file(str(file))
    assert keys == ("first-key", "second-key")
    rig = make_rig(settings={"api_keys": ("third-key",), "file_keys": keys})
    assert "-key'" not in repr(rig.settings)
    for key in (*keys, "third-key"):
        assert rig.ask("GET", "/v1/models", headers={"x-api-key": key}).status_code == 200
    assert rig.ask("GET", "/v1/models", headers={"x-api-key": "# of the team"}).status_code == 401


@pytest.mark.parametrize("data", [None, b"", b"# none\n", b"secret\xff"])
def test_a_file_without_a_key_is_refused_and_not_shown(tmp_path, data):
    file = tmp_path / "keys"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError, match="a line") as refused:
        read_key_file(str(file))
    assert "secret" not in str(refused.value)
