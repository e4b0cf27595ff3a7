"""Against a hub on the loopback, in processes of their own, as `huggingface_hub` reads its settings when imported."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "c" * 40
TREES = {
    "org/dense": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"x",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "onnx/model.onnx": b"big",
    },
    "org/ggufs": {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight", "README.md": b"x"},
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}

SCRIPT = """
import json, sys
from tiercel.base.errors import TiercelError
from tiercel.hub.resolve import resolve
options = json.loads(sys.argv[1])
try:
    found = resolve(options.pop("name"), **options)
except TiercelError as error:
    print(json.dumps([type(error).__name__, str(error)]))
else:
    paths = [found.path] if found.path.is_file() else sorted(p for p in found.path.rglob("*") if p.is_file())
    print(json.dumps([found.display_name, found.source, [p.name for p in paths], [p.read_text() for p in paths]]))
"""


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(has_body=False)

    def do_GET(self):
        self.answer(has_body=True)

    def answer(self, *, has_body):
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        path = self.path.partition("?")[0]
        for name, tree in TREES.items():
            if path in (
                f"/api/models/{name}",
                f"/api/models/{name}/revision/main",
                f"/api/models/{name}/revision/{COMMIT}",
            ):
                siblings = [{"rfilename": file} for file in tree]
                return self.send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), has_body)
            if path.startswith(f"/api/models/{name}/tree/"):
                rows = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in tree.items()
                ]
                return self.send(json.dumps(rows).encode(), has_body)
            for revision in ("main", COMMIT):
                file = path.removeprefix(f"/{name}/resolve/{revision}/")
                if file in tree:
                    return self.send(tree[file], has_body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def send(self, body, has_body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(hub, tmp_path):
    def run(name, *, settings=(), **options):
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **dict(settings),
        }
        command = [sys.executable, "-c", SCRIPT, json.dumps({"name": name, **options})]
        said = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout.splitlines()[-1])

    return run


def test_a_dense_repository_is_fetched_without_code_and_pickles_and_then_found_offline(ask, hub, tmp_path):
    fetched = ask("org/dense", settings={"HF_TOKEN": "hf_secret"})
    assert fetched[:2] == ["org/dense", "hub"]
    assert fetched[2] == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "hf").is_dir()
    assert "Bearer hf_secret" in {token for _, _, token in hub.asked}
    hub.asked.clear()
    assert ask("org/dense", offline=True) == fetched
    assert ask("org/dense", settings={"HF_HUB_OFFLINE": "1"}) == fetched
    assert hub.asked == []
    # Nobody answers at this port: what is here serves.
    assert ask("org/dense", settings={"HF_ENDPOINT": "http://127.0.0.1:9"}) == fetched


def test_where_a_config_is_enough_no_weight_is_fetched(ask, hub):
    assert ask("org/dense", config_only=True)[2:] == [["config.json"], ["{}"]]
    assert not any("safetensors" in path for _, path, _ in hub.asked)
    assert ask("org/dense", config_only=True, offline=True)[2:] == [["config.json"], ["{}"]]
    assert ask("org/dense", offline=True)[0] != "org/dense", "a model without weights is none to run"
    whole = ask("org/dense")
    assert ask("org/dense", config_only=True) == whole, "what is here stays here"
    assert ask("org/ggufs:q8_0", config_only=True)[2] == ["m-Q8_0.gguf"], "a config is in the file itself"
    assert "can run code" in ask("org/pickles", config_only=True)[1]


def test_a_key_and_a_folder_that_are_given_are_used(ask, hub, tmp_path):
    options = {"hf_token": "hf_given", "download_dir": str(tmp_path / "mine")}
    fetched = ask("org/dense", settings={"HF_TOKEN": "hf_other"}, **options)
    assert {token for _, _, token in hub.asked} == {"Bearer hf_given"}
    assert list((tmp_path / "mine").rglob("model.safetensors"))
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    assert ask("org/dense", offline=True, **options) == fetched
    assert ask("org/dense", offline=True)[0] == "DownloadError"


def test_of_several_gguf_files_only_the_picked_one_is_fetched(ask, hub):
    assert ask("org/ggufs:q8_0")[2:] == [["m-Q8_0.gguf"], ["eight"]]
    assert not any("Q4_0" in path for _, path, _ in hub.asked)
    assert ask("org/ggufs:Q8_0", offline=True)[2:] == [["m-Q8_0.gguf"], ["eight"]]
    kind, message = ask("org/ggufs")
    assert kind == "ModelNotFound"
    assert "m-Q4_0.gguf, m-Q8_0.gguf" in message


@pytest.mark.parametrize(
    ("name", "options", "kind", "words"),
    [
        ("org/absent", {}, "ModelNotFound", "HF_TOKEN"),
        ("org/pickles", {}, "ModelNotFound", "can run code"),
        ("org/dense", {"offline": True}, "DownloadError", "in its cache"),
        ("org/a..b", {}, "ModelNotFound", "spelling"),
    ],
)
def test_what_cannot_be_had_is_told_with_the_reason(ask, name, options, kind, words):
    got, message = ask(name, **options)
    assert got == kind
    assert words in message
    assert "\n" not in message
