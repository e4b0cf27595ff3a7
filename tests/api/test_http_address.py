"""A server on a Unix socket, and what may be in its way."""

import os
import resource
import socket
import stat
from pathlib import Path

import httpx
import pytest

from tiercel.api.http.address import make_room, take_address
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's address is short, and a test's folder may not be
    return "s.sock"


def settings_for(path):
    return ServerSettings(served_names=("a",), uds=path)


def get(path, route="/v1/models"):
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://uds") as client:
        return client.get(route)


def test_a_unix_socket_serves_and_is_gone_at_the_end(make_live, path):
    live = make_live(settings={"uds": path})
    assert get(path).json()["data"][0]["id"] == "tiny"
    live.close()
    assert not os.path.lexists(path)


def test_a_unix_socket_is_for_this_user_alone(make_live, path):
    make_live(settings={"uds": path})
    mode = Path(path).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_socket_that_its_server_left_behind_is_replaced(make_live, path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    make_live(settings={"uds": path})
    assert get(path).status_code == 200


def test_a_socket_that_somebody_listens_on_is_in_use(path):
    first = take_address(settings_for(path))
    with pytest.raises(OSError, match="in use"):
        take_address(settings_for(path))
    assert os.path.lexists(path)
    first.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed(path, kind, tmp_path):
    (tmp_path / "precious").write_text("precious")
    if kind == "file":
        (tmp_path / path).write_text("precious")
    elif kind == "folder":
        (tmp_path / path).mkdir()
    else:
        (tmp_path / path).symlink_to("precious")
    with pytest.raises(FileExistsError):
        take_address(settings_for(path))
    assert os.path.lexists(path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_another_servers_socket_is_left_where_ours_was(path):
    ours = take_address(settings_for(path))
    Path(path).unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path + "2")
        Path(path + "2").rename(path)
        ours.close()
        assert os.path.lexists(path)


def test_a_path_longer_than_a_socket_may_have_is_refused_before_anything():
    with pytest.raises(ConfigError, match="bytes"):
        settings_for("x" * 108)


def test_on_a_unix_socket_no_key_is_needed_whatever_the_host_would_be():
    ServerSettings(served_names=("a",), uds="s.sock", host="0.0.0.0")


@pytest.fixture
def limit():
    """Set how many files may be open, and set it back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_room_is_made_for_every_connection_that_is_served(limit):
    limit(300)
    make_room(50)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 306
    make_room(10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 306


def test_a_limit_that_leaves_too_little_room_is_told(limit, monkeypatch, caplog):
    limits = [(100, 200)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    make_room(1000)
    assert limits[-1] == (200, 200)
    assert "ulimit -n" in caplog.text
