"""`--config FILE`: what a flag says, a file may say; whatever is wrong is named with the file and the key."""

import pytest

from tiercel.base.absent import REMOVED
from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError, UnknownOption
from tiercel.cli import bench, run, run_batch, serve
from tiercel.cli.options import ENGINE_OPTIONS, given_options
from tiercel.cli.parsing import CommandParser


@pytest.fixture
def parse(home):
    """Read the flags of a command, with a file of options if one is written."""

    def read(*words, text=None, command=serve.configure, name="options.yaml"):
        parser = CommandParser("tiercel test", "a test")
        command(parser)
        if text is not None:
            with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
                file.write(text)
            words = ("--config", name, *words)
        return parser.parse(words)

    return read


def engine_of(args):
    return given_options(args, ENGINE_OPTIONS)


@pytest.mark.parametrize("key", ["max-model-len", "max_model_len", "max-model_len"])
@pytest.mark.parametrize("text", ["25.6k", "25600", '"25600"'])
def test_a_key_is_a_flag_by_its_name(parse, key, text):
    assert engine_of(parse(text=f"{key}: {text}\n")) == {"max_model_len": 25600}


@pytest.mark.parametrize(("text", "value"), [("false", False), ("no", False), ("true", True)])
def test_v51573_a_switch_that_is_false_is_off(parse, text, value):
    assert engine_of(parse(text=f"enable-prefix-caching: {text}\n")) == {"enable_prefix_caching": value}


def test_a_switch_that_switches_off_is_read_as_it_is_written(parse):
    for text, value in (("true", False), ("false", True)):
        args = parse(text=f"disable-log-stats: {text}\n")
        assert serve.read_settings(args, {}).has_stats_log is value


def test_groups_lists_and_objects_are_written_as_such(parse):
    lines = [
        "model: tiny",
        "server:",
        "  port: 9000",
        "  served-model-name: [a, b]",
        "  api-key: k",
        "cache: {block-size: 32}",
        "override-generation-config: {temperature: 0.5}",
    ]
    args = parse(text="\n".join(lines))
    assert args.model == "tiny"
    assert (args.port, args.served_model_name, args.api_key) == (9000, ["a", "b"], ["k"])
    assert engine_of(args) == {"block_size": 32, "override_generation_config": {"temperature": 0.5}}


def test_a_flag_wins_over_the_file(parse):
    text = "model: a\nport: 9000\napi-key: [k]\nserved-model-name: x\nenable-prefix-caching: true\n"
    args = parse("b", "--port=9001", "--api-key", "l", "--no-enable-prefix-caching", text=text)
    assert (args.model, args.port, args.api_key, args.served_model_name) == ("b", 9001, ["l"], ["x"])
    assert engine_of(args) == {"enable_prefix_caching": False}


def test_the_file_wins_over_the_environment_and_that_over_the_default(parse):
    environ = {"VLLM_LOG_STATS_INTERVAL": "3", "VLLM_CPU_KVCACHE_SPACE": "1.5"}
    assert serve.read_settings(parse(), {}).stats_interval_s == 10.0
    assert serve.read_settings(parse(), environ).stats_interval_s == 3.0
    args = parse(text="log-stats-interval: 4\nkv-cache-memory-bytes: 2GiB\n")
    assert serve.read_settings(args, environ).stats_interval_s == 4.0
    assert engine_options(environ=environ).kv_cache_memory_bytes == 3 << 29
    assert engine_options(environ=environ, **engine_of(args)).kv_cache_memory_bytes == 2 << 30


@pytest.mark.parametrize("command", [run.configure, run_batch.configure, bench.COMMANDS["latency"].configure])
def test_every_command_that_starts_an_engine_takes_a_file(parse, command):
    words = ("-i", "in", "-o", "out") if command is run_batch.configure else ()
    args = parse(*words, text="model: tiny\nthreads: 2\n", command=command)
    assert (args.model, args.threads) == ("tiny", 2)


def test_what_a_command_needs_may_stand_in_the_file(parse):
    args = parse(text="input-file: in\noutput-file: out\n", command=run_batch.configure)
    assert (args.input_file.name, args.output_file.name) == ("in", "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 4", "max_num_seq: no option of tiercel test; did you mean max-num-seqs"),
        ("zzz: 4", "zzz: no option of tiercel test"),
        ("config: other.yaml", "config: a file cannot say that"),
        ("no-enable-prefix-caching: true", "need enable-prefix-caching: false"),
        ("enable-prefix-caching: 1", "enable-prefix-caching: got int '1'; need true or false"),
        ("enable-prefix-caching: 'off'", "enable-prefix-caching: got str 'off'; need true or false"),
        ("max-model-len: true", "max-model-len: got true; need one value"),
        ("max-model-len: [1, 2]", "max-model-len: got list"),
        ("max-model-len: 1.5", "max-model-len: got '1.5'"),
        ("max-model-len:", "max-model-len: got no value"),
        ("max-model-len: many", "max-model-len: got 'many'"),
        ("scheduling-policy: lifo", "scheduling-policy: got 'lifo'; needs one of fcfs, priority"),
        ("port: 80", "port: got 80; need 1024 to 65535"),
        ("override-generation-config: 3", "override-generation-config: got int '3'; need names with values"),
        ("override-generation-config: {temp: 1}", "override-generation-config: got 'temp'; known are temperature"),
        ("seed: 1\nseed: 2", "seed: it is there twice"),
        ("max-model-len: 1k\nmax_model_len: 2k", "max_model_len: it is there twice"),
        ("quantization: bitsandbytes", "quantization: bitsandbytes is not in the core"),
        ("tensor-parallel-size: 2", "tensor-parallel-size: one process uses all"),
        ("enable-lora: true", "enable-lora: adapters"),
        ("1: 2", "got 1 as a name"),
        ("- a", "got a list"),
        ("a: [", "it is no YAML"),
    ],
)
def test_what_no_flag_may_say_is_refused_with_file_and_key(parse, text, message):
    with pytest.raises(ConfigError) as caught:
        parse(text=text + "\n")
    assert str(caught.value).startswith("options.yaml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(REMOVED))
@pytest.mark.parametrize("sign", "-_")
def test_a_removed_key_is_refused_with_its_hint(parse, name, sign):
    key = name.replace("_", sign)
    with pytest.raises(UnknownOption) as caught:
        parse(text=f"{key}: 1\n")
    assert str(caught.value) == f"options.yaml: {key}: {REMOVED[name]}"


def test_a_key_that_changes_nothing_is_taken(parse):
    text = "tensor-parallel-size: 1\nenforce_eager: true\ngpu-memory-utilization: 0.9\ntrust-remote-code: false\n"
    assert engine_of(parse(text=text)) == {}


def test_an_empty_file_says_nothing(parse):
    assert engine_of(parse(text="# nothing\n")) == {}


@pytest.mark.parametrize("name", ["no/such.yaml", "options.json"])
def test_a_file_that_cannot_be_read_is_named(parse, name):
    with pytest.raises(ConfigError, match=name):
        parse("--config", name)


def test_two_files_are_refused(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--config", "a.yaml", "--config=b.yaml")
    assert "got 2 files" in capsys.readouterr().err


def test_yaml_is_no_more_than_values(parse):
    with pytest.raises(ConfigError, match="it is no YAML"):
        parse(text="model: !!python/object/apply:os.getcwd []\n")
