"""Options of vLLM's that are none here: taken with values that change nothing, refused with a reason, never unknown."""

from pathlib import Path

import pytest

from tiercel.api.http.settings import server_rows
from tiercel.base import absent, env
from tiercel.base.config import EngineOptions, engine_options, engine_rows
from tiercel.base.errors import ConfigError, UnknownOption
from tiercel.cli import serve
from tiercel.cli.parsing import CommandParser

# Every long flag of `vllm serve` 0.28, without its dashes.
VLLM = Path(__file__).with_name("vllm_flags.txt").read_text().split()
ROWS = (*engine_rows(), *engine_rows("source"), *server_rows())
SWITCHES = sorted(name for name, row in absent.ABSENT.items() if row.is_switch)
VALUES = sorted(name for name, row in absent.ABSENT.items() if not row.is_switch)
# What a flag of each listed option would not be taken with.
OTHER = "something-else"


@pytest.fixture
def parse():
    parser = CommandParser("tiercel serve", "a test")
    serve.configure(parser)
    return lambda *words: parser.parse(words)


def refused(parse, capsys, *words):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_every_flag_of_vllm_is_known():
    known = {row.flag[2:] for row in ROWS} | {"model", "config"}
    assert [name for name in VLLM if name not in known and not absent.is_listed(name.replace("-", "_"))] == []


def test_no_engine_option_is_also_none():
    names = {row.name for row in (*engine_rows(), *engine_rows("source"))}
    assert not names & (set(absent.REMOVED) | set(absent.ABSENT))
    assert not set(absent.REMOVED) & set(absent.ABSENT)
    assert set(absent.SHORT.values()) <= set(absent.ABSENT)
    assert not set(absent.SHORT) & {row.short for row in ROWS}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("sign", "-_")
def test_a_flag_without_a_meaning_is_refused_with_its_reason(parse, capsys, name, sign):
    if name == "renderer_num_workers":
        pytest.skip("a flag of the server")
    said = refused(parse, capsys, "--" + name.replace("_", sign), OTHER)
    assert said.startswith(f"tiercel serve: --{name.replace('_', '-')}: {absent.ABSENT[name].why}")


@pytest.mark.parametrize("name", VALUES)
def test_a_flag_without_a_meaning_is_taken_with_values_that_change_nothing(parse, name):
    for value in absent.ABSENT[name].same:
        if isinstance(value, str | int | float) and value != "":
            assert vars(parse("--" + name, str(value), "a")) | {} == vars(parse("a")) | more(name, value)
            assert parse(f"--{name}={value}", "a").model == "a"


def more(name, value):
    return {name: value} if name == "renderer_num_workers" else {}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_without_a_meaning_is_taken_or_refused_by_what_it_says(parse, capsys, name):
    for word, value in ((f"--{name}", True), (f"--no-{name.replace('_', '-')}", False)):
        if value in absent.ABSENT[name].same:
            assert parse(word, "a").model == "a"
        else:
            assert absent.ABSENT[name].why in refused(parse, capsys, word, "a")


@pytest.mark.parametrize("name", [*VALUES, *SWITCHES])
def test_a_keyword_without_a_meaning_is_judged_alike(name):
    for value in (*absent.ABSENT[name].same, None):
        assert engine_options(**{name: value}) == EngineOptions()
    with pytest.raises(TypeError) as caught:
        engine_options(**{name: OTHER})
    assert isinstance(caught.value, UnknownOption)
    assert str(caught.value).startswith(f"option {name}: {absent.ABSENT[name].why}")


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        (["-tp", "1"], True),
        (["-tp=1"], True),
        (["-tp", "2"], False),
        (["-dp", "2"], False),
        (["-asc", "1"], True),
        (["-ep"], False),
        (["-O2"], True),
        (["-O3"], False),
        (["-O", "3"], False),
        (["-cc", '{"mode": 3}'], False),
        (["-cc.mode", "3"], False),
        (["--speculative-config", '{"method": "ngram"}'], True),
        (["-sc", '{"method": "suffix"}'], True),
        (["--gpu-memory-utilization", "0.90"], True),
        (["--gpu-memory-utilization", "0.5"], False),
        (["--lora-modules", "a=b", "c=d"], False),
        (["--tensor-parallel-size"], False),
        (["--calculate-kv-scales=true"], False),
    ],
)
def test_short_dotted_and_attached_forms_are_known(parse, capsys, words, is_taken):
    if is_taken:
        assert parse("a", *words).model == "a"
    else:
        assert "unknown" not in refused(parse, capsys, "a", *words)


def test_a_flag_of_another_command_is_told_so(capsys):
    from tiercel.cli import run

    parser = CommandParser("tiercel run", "a test")
    run.configure(parser)
    assert "a flag of `tiercel serve`" in refused(lambda *words: parser.parse(words), capsys, "--port", "9000")


@pytest.mark.parametrize("name", sorted(absent.REMOVED))
def test_a_removed_keyword_is_refused_with_its_hint(name):
    with pytest.raises(TypeError, match="option ") as caught:
        engine_options(**{name: 1})
    assert str(caught.value) == f"option {name}: {absent.REMOVED[name]}"


@pytest.mark.parametrize("name", sorted(absent.REMOVED_VARIABLES))
def test_a_removed_variable_is_refused_with_its_hint(name):
    with pytest.raises(UnknownOption) as caught:
        engine_options(environ={name: "1"})
    assert str(caught.value) == f"environment {name}: {absent.REMOVED_VARIABLES[name]}"
    assert engine_options(environ={name: ""}) == EngineOptions()


def test_variables_that_are_not_read_are_told_once_in_one_line():
    told = env.unread({"VLLM_CACHE_ROOT": "/x", "VLLM_PLUGINS": "a", "VLLM_API_KEY": "k", "VLLM_BATCH_INVARIANT": "1"})
    assert told == "set in the environment and not read here: VLLM_CACHE_ROOT (set TIERCEL_HOME), VLLM_PLUGINS"
    assert env.unread({name: "1" for name in env.HONOURED} | {"HOME": "/x"}) is None


def test_every_variable_of_a_row_is_in_the_list_that_env_prints():
    theirs = {name for row in ROWS for name, _ in row.env if name.startswith("VLLM_")}
    assert theirs <= set(env.HONOURED)


@pytest.mark.parametrize("value", ["x", "-1"])
def test_a_wrong_value_of_a_variable_names_it(value):
    with pytest.raises(ConfigError, match="environment VLLM_CPU_KVCACHE_SPACE"):
        engine_options(environ={"VLLM_CPU_KVCACHE_SPACE": value})
    with pytest.raises(ConfigError, match="environment VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        serve.server_settings({}, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": value})


def test_bitsandbytes_is_refused_from_every_door(parse, capsys):
    assert "bitsandbytes is not in the core" in refused(parse, capsys, "-q", "bitsandbytes")
    for make in (engine_options, EngineOptions):
        with pytest.raises(TypeError, match="quantization: bitsandbytes is not in the core"):
            make(quantization="bitsandbytes")
