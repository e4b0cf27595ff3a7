"""What the sources may not hold: pickles, evaluated text, other people's code, checks that vanish."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import PACKAGE, named, python_files, tree_of

from tiercel.base.errors import ModelFileError, RequestError, UnsupportedModel
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.text.chat_template import ChatTemplate
from tiercel.text.parsers.json_values import read_literal

SOURCES = python_files("src")
TESTS = Path(__file__).parent.parent
# Modules that make objects of bytes by running what the bytes say.
_PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}


def imports(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def calls(path):
    """Give every call's line and the name it calls, as far as it is written."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_CVE_2024_9052_nothing_imports_a_pickle():
    found = {(named(path), name) for path in SOURCES for name in imports(path) if name.partition(".")[0] in _PICKLES}
    assert not found
    # Of YAML, which can make any object, only the reader that makes none.
    yaml = {(named(path), name) for path in SOURCES for _, name in calls(path) if name.startswith("yaml.")}
    assert {name for _, name in yaml} <= {"yaml.safe_load", "yaml.compose"}
    assert "yaml.compose(text, yaml.SafeLoader)" in (PACKAGE / "cli" / "config_file.py").read_text()
    allowing = [
        named(path) for path in SOURCES for node, _ in calls(path) for key in node.keywords if key.arg == "allow_pickle"
    ]
    assert not allowing


def test_CVE_2026_3059_no_word_of_a_pickle_is_a_switch():
    """A switch that turns pickles off is one that turns them on."""
    words = re.compile(r"\b(un)?pickl(e|er|ing)\b|safe_unpickl|weights_only|torch\.load")
    allowed = {"src/tiercel/loaders/checkpoint.py", "src/tiercel/hub/hf_source.py"}  # they say that they refuse them
    assert {named(path) for path in SOURCES if words.search(path.read_text())} <= allowed


def test_CVE_2025_9141_no_text_is_evaluated():
    found = {(named(path), name) for path in SOURCES for _, name in calls(path) if name in ("eval", "exec", "compile")}
    assert not found
    for text in ("__import__('os')", "f()", "1+1", "x", "[i for i in (1,)]", "(" * 5000, "-" * 5000 + "1"):
        with pytest.raises(ValueError, match="literal"):
            read_literal(text)
    with pytest.raises(ValueError, match="Expecting"):
        read_literal("(" + "1," * 40_000 + ")")  # too long for Python's reader


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl"])
def test_CVE_2025_24357_pickled_weights_are_never_opened(put, tmp_path, suffix):
    ran = tmp_path / "ran"
    code = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
    put(json.dumps({"model_type": "llama"}).encode(), "config.json")
    with pytest.raises(ModelFileError):
        open_checkpoint(put(code, f"pytorch_model{suffix}"))
    with pytest.raises(ModelFileError):
        open_checkpoint(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("field", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_CVE_2025_66448_no_code_of_a_models_folder_is_imported(put, tmp_path, field):
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n".encode()
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py", "custom_generate/generate.py"):
        put(code, name)
    names = {
        "AutoConfig": "other/repo--configuration.C",
        "AutoModelForCausalLM": "modeling.M",
        "AutoTokenizer": ["x.T"],
    }
    for name in ("config.json", field):
        put(json.dumps({"model_type": "evil", "architectures": ["M"], "auto_map": names}).encode(), name)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        open_checkpoint(tmp_path)
    assert not ran.exists()
    dynamic = {
        (named(path), ast.unparse(node))
        for path in SOURCES
        for node, name in calls(path)
        if name.endswith(("import_module", "__import__", "spec_from_file_location", "run_path", "SourceFileLoader"))
        and not (node.args and isinstance(node.args[0], ast.Constant))
    }
    # What is imported by a name that is not written there is from a table of our own, or what --middleware,
    # --kv-tiers or --speculative-config named.
    ours = {"__init__.py", "cli/main.py", "api/http/middleware.py", "kv/tiers/registry.py", "spec/settings.py"}
    assert {where for where, _ in dynamic} <= {f"src/tiercel/{name}" for name in ours}


def test_CVE_2026_27893_no_call_trusts_remote_code():
    found = [
        named(path)
        for path in SOURCES
        for node, _ in calls(path)
        for key in node.keywords
        if key.arg == "trust_remote_code"
    ]
    assert not found


def test_CVE_2025_47277_one_place_listens_and_only_where_it_is_told(make_rig):
    listening = {
        named(path)
        for path in SOURCES
        for _, name in calls(path)
        if name.endswith((".listen", ".start_server", ".create_server", ".start_unix_server", ".create_unix_server"))
        or name.rpartition(".")[2] in ("TCPServer", "HTTPServer", "ThreadingHTTPServer", "Listener")
    }
    assert listening == {"src/tiercel/api/http/address.py"}
    assert not {named(path) for path in SOURCES for name in imports(path) if name.partition(".")[0] in ("zmq", "nng")}
    from tiercel.api.http.address import take_address

    address = take_address(make_rig(settings={"port": 0}).settings)
    assert address.listener.getsockname()[0] == "127.0.0.1"
    address.close()


def test_CVE_2026_5760_templates_are_only_rendered_in_the_sandbox():
    environments = {
        (named(path), name)
        for path in SOURCES
        for _, name in calls(path)
        if name.rpartition(".")[2] in ("Environment", "SandboxedEnvironment", "NativeEnvironment", "Template")
        or name.endswith("Loader")
    }
    assert not environments
    hostile = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ ('%s' | format(messages.__class__)).x.y }}",
        "{{ '{0.__class__!r:>999999}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    )
    for source in hostile:
        with pytest.raises((ModelFileError, RequestError)):
            ChatTemplate(source, bos_token=None, eos_token=None).render([{"role": "user", "content": "x"}])


PROGRAM = """
import json, sys
sys.path[:0] = {paths!r}
assert not __debug__ or sys.exit("asserts are on")
from kit import Rig
rig = Rig(settings={{"api_keys": ("k",), "n_outputs_max": 4, "body_bytes_max": 5000}})
told = []
for path, body, headers in json.loads(sys.stdin.read()):
    response = rig.ask("POST", path, json=body, headers=headers)
    told.append(response.status_code)
rig.close()
print(json.dumps(told))
"""
ATTACKS = (
    ("/v1/completions", {"prompt": "x"}, {}, 401),
    ("/v1/completions", {"prompt": "x"}, {"x-api-key": "wrong"}, 401),
    ("/v1/completions", {"prompt": "x", "n": 5}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": [-1]}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": [2**40]}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": ""}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": "x" * 400}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": "x" * 6000}, {"x-api-key": "k"}, 413),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"999": 1}}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, {"x-api-key": "k"}, 400),
    ("/v1/chat/completions", {"messages": []}, {"x-api-key": "k"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, {"x-api-key": "k"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, {"x-api-key": "k"}, 400),
    ("/detokenize", {"tokens": [-1]}, {"x-api-key": "k"}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"x-api-key": "k"}, 200),
)


def test_CVE_2026_41523_no_check_vanishes_when_asserts_do():
    program = PROGRAM.format(paths=[str(TESTS / "api"), str(PACKAGE.parent)])
    asked = json.dumps([attack[:3] for attack in ATTACKS])
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], input=asked, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [attack[3] for attack in ATTACKS]
