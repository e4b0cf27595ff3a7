import dataclasses

import pytest

from tiercel.base.absent import REMOVED
from tiercel.base.config import EngineOptions
from tiercel.cli.options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    SOURCE_OPTIONS,
    add_engine_options,
    add_options,
    given_options,
)
from tiercel.cli.parsing import CommandParser
from tiercel.protocol.params import SamplingParams


@pytest.fixture
def parser():
    parser = CommandParser("tiercel test", "a test")
    parser.add_argument("words", nargs="*")
    parser.add_argument("-m", "--model")
    add_engine_options(parser)
    return parser


def refused(parser, capsys, *words):
    with pytest.raises(SystemExit) as caught:
        parser.parse(words)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: tiercel test")
    return said.err.splitlines()[-1]


def test_only_what_is_written_is_given(parser):
    assert given_options(parser.parse([]), ENGINE_OPTIONS) == {}
    args = parser.parse(["--max-model-len", "25.6k", "--kv-cache-memory-bytes", "2GiB", "--no-enable-prefix-caching"])
    assert given_options(args, ENGINE_OPTIONS) == {
        "max_model_len": 25600,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize("word", ["--max_model_len=4K", "--max-model-len=4K", "--max_model-len=4K"])
def test_a_flag_is_written_with_dashes_or_underscores(parser, word):
    assert parser.parse([word]).max_model_len == 4096


def test_a_value_keeps_its_underscores(parser):
    assert parser.parse(["--model=my_model", "a_b"]).model == "my_model"
    assert parser.parse(["a_b"]).words == ["a_b"]


@pytest.mark.parametrize(("text", "value"), [("auto", -1), ("-1", -1), ("8k", 8000)])
def test_the_length_may_be_automatic(parser, text, value):
    assert parser.parse(["--max-model-len", text]).max_model_len == value


def test_flags_may_stand_between_the_words(parser):
    args = parser.parse(["one", "--threads", "2", "two", "-q", "q8_0"])
    assert args.words == ["one", "two"]
    assert (args.threads, args.quantization) == (2, "q8_0")


def test_everything_after_two_dashes_is_taken_as_it_stands(parser):
    args = parser.parse(["one", "--threads", "2", "--", "--threads_x", "-m"])
    assert args.words == ["one", "--threads_x", "-m"]
    assert args.model is None


def test_an_unknown_flag_names_the_nearest(parser, capsys):
    said = refused(parser, capsys, "--max_modle_len", "4k")
    assert said == "tiercel test: unknown flag --max-modle-len; did you mean --max-model-len?"


def test_an_unknown_flag_without_a_neighbour_points_to_help(parser, capsys):
    assert "--help" in refused(parser, capsys, "--zzzzzz")


def test_a_flag_is_not_known_by_its_beginning(parser, capsys):
    assert "unknown flag --max-model" in refused(parser, capsys, "--max-model", "4k")


def test_a_text_of_several_words_is_no_flag_whatever_it_begins_with(parser):
    assert parser.parse(["--what is this_thing", "-x y"]).words == ["--what is this_thing", "-x y"]


@pytest.mark.parametrize("text", ["x", "1.5", "", "1e3"])
def test_a_value_of_the_wrong_form_names_its_flag(parser, capsys, text):
    said = refused(parser, capsys, "--max-model-len", text)
    assert "--max-model-len" in said
    assert "got" in said


@pytest.mark.parametrize("name", sorted(REMOVED))
@pytest.mark.parametrize("sign", "-_")
@pytest.mark.parametrize("value", [["3"], []], ids=["value", "bare"])
def test_a_removed_flag_is_refused_with_its_hint(parser, capsys, name, sign, value):
    said = refused(parser, capsys, "--" + name.replace("_", sign), *value)
    assert said == f"tiercel test: --{name.replace('_', '-')}: {REMOVED[name]}"


def test_a_removed_flag_with_its_value_attached_is_refused(parser, capsys):
    assert "removed" in refused(parser, capsys, "--swap_space=4")


def test_a_flag_given_twice_counts_as_the_last_and_says_so(parser, capsys):
    assert parser.parse(["--threads", "1", "--threads=2"]).threads == 2
    assert "--threads is given 2 times; the last one counts" in capsys.readouterr().err


def test_one_word_too_many_for_a_single_place_is_refused(capsys):
    parser = CommandParser("tiercel test", "a test")
    parser.add_argument("name", nargs="?")
    assert parser.parse(["a"]).name == "a"
    assert parser.parse(["--", "-a"]).name == "-a"
    for words in (["a", "b"], ["a", "--", "b"]):
        assert "one word too many: 'b'" in refused(parser, capsys, *words)


def test_every_engine_option_has_a_flag_and_every_flag_an_option():
    known = {field.name for field in dataclasses.fields(EngineOptions)} - {"model"}
    assert {option.name for option in (*ENGINE_OPTIONS, *SOURCE_OPTIONS)} == known


def test_every_sampling_option_is_a_parameter():
    assert {option.name for option in SAMPLING_OPTIONS} <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x", ""])
def test_what_is_no_finite_number_is_refused(text, capsys):
    parser = CommandParser("tiercel test", "a test")
    add_options(parser, SAMPLING_OPTIONS)
    assert "need a number" in refused(parser, capsys, f"--temperature={text}")
