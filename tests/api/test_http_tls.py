"""TLS on a real socket: certificates, those of clients, and new ones while connections are open."""

import shutil
import socket
import ssl
import subprocess

import httpx
import pytest
from kit import DEADLINE_S

from tiercel.api.http.settings import ServerSettings
from tiercel.api.http.tls import Tls
from tiercel.base.errors import ConfigError

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)


class Certificate:
    """A certificate for this machine and its key, signed by itself, in two files."""

    def __init__(self, folder, name="server"):
        self.cert, self.key = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
        self._folder = folder
        self.make(name)

    def make(self, name):
        """Write a new one over the old."""
        kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        openssl("req", *kind, *names, "-keyout", self.key, "-out", self.cert)

    @property
    def settings(self):
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key}

    def trusted(self):
        """Give a client's context that believes this certificate as it is now, and no other."""
        return ssl.create_default_context(cafile=self.cert)


def openssl(*words):
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture
def certificate(tmp_path):
    return Certificate(tmp_path)


def ask(live, trust, path="/v1/models"):
    return httpx.get(f"{live.url}{path}", verify=trust, timeout=DEADLINE_S)


def is_believed(live, trust):
    try:
        return ask(live, trust).status_code == 200
    except httpx.ConnectError:
        return False


def test_requests_and_streams_go_over_tls(make_live, certificate):
    live = make_live(settings=certificate.settings)
    trust = certificate.trusted()
    assert ask(live, trust).status_code == 200
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, verify=trust) as response:
        assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")
    live.rig.assert_idle()


def test_plain_http_on_a_tls_port_is_no_answer_and_harms_nobody(make_live, certificate):
    live = make_live(settings=certificate.settings)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{live.port}/health")
    assert is_believed(live, certificate.trusted())


def test_a_new_certificate_serves_new_connections_and_drops_no_old_one(make_live, certificate):
    live = make_live(settings=certificate.settings)
    old_trust = certificate.trusted()
    with httpx.Client(verify=old_trust, base_url=live.url, limits=httpx.Limits(keepalive_expiry=60)) as client:
        client.get("/health")
        certificate.make("second")
        assert live.tls.refresh()
        assert is_believed(live, certificate.trusted())
        assert not is_believed(live, old_trust)
        assert client.get("/v1/models").status_code == 200
        assert live.rig.service.n_connections == 1


def test_files_that_did_not_change_are_not_read_again(certificate):
    tls = Tls(ServerSettings(served_names=("a",), **certificate.settings))
    assert not tls.refresh()


@pytest.mark.parametrize("damage", ["broken", "half", "gone"])
def test_a_new_certificate_that_is_broken_keeps_the_old_one(make_live, certificate, tmp_path, damage, caplog):
    live = make_live(settings=certificate.settings)
    trust = certificate.trusted()
    other = Certificate(tmp_path, "other")
    if damage == "broken":
        (tmp_path / "server.crt").write_text("no certificate")
    elif damage == "half":
        shutil.copy(other.cert, certificate.cert)
    else:
        (tmp_path / "server.key").unlink()
    assert not live.tls.refresh()
    assert "the old one stays" in caplog.text
    assert str(tmp_path) not in caplog.text
    caplog.clear()
    assert not live.tls.refresh()
    assert caplog.text == ""  # told once
    assert is_believed(live, trust)
    shutil.copy(other.key, certificate.key)
    shutil.copy(other.cert, certificate.cert)
    assert live.tls.refresh()
    assert is_believed(live, certificate.trusted())


def test_a_client_without_the_certificate_that_is_needed_stays_outside(make_live, certificate, tmp_path):
    friend = Certificate(tmp_path, "friend")
    live = make_live(settings=certificate.settings | {"ssl_ca_certs": friend.cert, "ssl_cert_reqs": 2})
    trust = certificate.trusted()
    with pytest.raises(httpx.TransportError):
        ask(live, trust)
    trust.load_cert_chain(friend.cert, friend.key)
    assert ask(live, trust).status_code == 200
    friend.make("friend")  # signed by itself: whom the new file names, the old one did not
    assert live.tls.refresh()
    with pytest.raises(httpx.TransportError):
        ask(live, trust)


def test_the_protocol_is_modern(make_live, certificate):
    live = make_live(settings=certificate.settings)
    with (
        socket.create_connection(("127.0.0.1", live.port), timeout=DEADLINE_S) as raw,
        certificate.trusted().wrap_socket(raw, server_hostname="127.0.0.1") as secure,
    ):
        assert secure.version() in ("TLSv1.2", "TLSv1.3")


def test_files_that_do_not_belong_together_are_told_at_the_start(certificate, tmp_path):
    other = Certificate(tmp_path, "other")
    for wrong in ({"ssl_keyfile": other.key}, {"ssl_certfile": str(tmp_path / "none")}, {"ssl_ciphers": "none-such"}):
        settings = ServerSettings(served_names=("a",), **(certificate.settings | wrong))
        with pytest.raises(ConfigError, match="ssl_certfile"):
            Tls(settings)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(certificate, tmp_path):
    encrypted = str(tmp_path / "encrypted.key")
    openssl("ec", "-in", certificate.key, "-aes128", "-passout", "pass:secret", "-out", encrypted)
    settings = ServerSettings(served_names=("a",), ssl_certfile=certificate.cert, ssl_keyfile=encrypted)
    with pytest.raises(ConfigError, match="encrypted"):
        Tls(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"ssl_keyfile": "a"},
        {"enable_ssl_refresh": True},
        {"ssl_ca_certs": "a"},
        {"ssl_certfile": "a", "ssl_cert_reqs": 3},
        {"ssl_certfile": "a", "ssl_cert_reqs": 2},
    ],
)
def test_settings_of_tls_that_would_do_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match="ssl"):
        ServerSettings(served_names=("a",), **settings)
