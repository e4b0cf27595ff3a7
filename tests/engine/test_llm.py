"""`LLM` and `AsyncLLM` as people call them, on a tiny checkpoint in a folder."""

import asyncio
import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from tiercel import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from tiercel.base.absent import REMOVED
from tiercel.base.errors import (
    ConfigError,
    EngineDead,
    ModelFileError,
    ModelNotFound,
    OutOfPages,
    PromptTooLong,
    RequestError,
    RequestFailed,
    UnknownOption,
)
from tiercel.testing.tiny_model import write_tiny_model

SMALL = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LETTERS = list(range(ord("a"), ord("z") + 1))
END = 258  # <|im_end|>


def greedy(**changes):
    """Parameters that make the tiny model write small letters."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": LETTERS} | changes))


def ids(text):
    return list(text.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SMALL) as llm:
        yield llm
        assert_idle(llm.client)


def assert_idle(client):
    """Nothing runs or is remembered, and every page is free. Each turn is a round trip to the engine's thread, which
    publishes its numbers at the end of a round.
    """

    def held():
        is_free = client.reset_prefix_cache()
        snapshot = client.snapshot
        counts = (snapshot.n_running, snapshot.n_waiting, snapshot.n_pages_used, snapshot.n_pages_cached)
        return is_free, *counts, len(client._owners), len(client._requests)

    nothing = (True, 0, 0, 0, 0, 0, 0)
    assert any(held() == nothing for _ in range(1000)), held()


def text_of(llm, prompt, **params):
    (output,) = llm.generate(prompt, greedy(**params), use_tqdm=False)
    return output.outputs[0].text


# Prompts.


@pytest.mark.parametrize(
    "prompt",
    [
        "hello",
        ids("hello"),
        tuple(ids("hello")),
        np.array(ids("hello")),
        {"prompt": "hello"},
        {"prompt_token_ids": ids("hello")},
        {"prompt": "never looked at", "prompt_token_ids": ids("hello")},
        ["hello"],
        [ids("hello")],
        [{"prompt": "hello"}],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_one_prompt_of_any_shape_gets_one_output(llm, prompt):
    (output,) = llm.generate(prompt, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == ids("hello")
    assert output.outputs[0].text == text_of(llm, "hello")


def test_several_prompts_of_mixed_shapes_keep_their_order(llm):
    prompts = ["one", ids("two"), {"prompt": "three"}, {"prompt_token_ids": ids("four")}] * 5
    outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [bytes(output.prompt_token_ids).decode() for output in outputs] == ["one", "two", "three", "four"] * 5
    assert [output.outputs[0].text for output in outputs[:4]] == [
        text_of(llm, prompt) for prompt in ("one", "two", "three", "four")
    ]


def test_no_prompts_get_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", RequestError, "empty"),
        ([[]], RequestError, "empty"),
        (["fine", ""], RequestError, "prompt 1 of 2: .*empty"),
        ([[1, 2, 264]], RequestError, "ids 264; whole numbers from 0 to 263"),
        ([[-1]], RequestError, "ids -1"),
        ([1.5], RequestError, "float"),
        ([True], RequestError, "bool"),
        (None, RequestError, "NoneType"),
        ({"text": "x"}, RequestError, "'text'; known are prompt"),
        (ids("a" * 256), PromptTooLong, "256 tokens; at most 255"),
        ("a" * 5000, PromptTooLong, "5000 characters"),
        ("\ud800", RequestError, "surrogate"),
    ],
)
def test_a_wrong_prompt_is_refused_before_anything_runs(llm, prompt, error, message):
    before = llm.stats()["n_total_prompt_tokens"]
    with pytest.raises(error, match=message):
        llm.generate(prompt, greedy(), use_tqdm=False)
    assert_idle(llm.client)
    assert llm.stats()["n_total_prompt_tokens"] == before


@pytest.mark.parametrize("wrong", [{"temperature": 0}, [{"temperature": 0}], "greedy", 3])
def test_parameters_of_another_kind_are_refused(llm, wrong):
    with pytest.raises(RequestError, match=r"sampling_params: got .*SamplingParams is needed"):
        llm.generate("x", wrong, use_tqdm=False)


def test_parameters_come_one_for_all_or_one_each(llm):
    outputs = llm.generate(["a", "a"], [greedy(max_tokens=3), greedy(max_tokens=5)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(RequestError, match="sampling_params: got 2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()], use_tqdm=False)
    with pytest.raises(RequestError, match="priority: got 1 for 2 prompts"):
        llm.generate(["a", "b"], greedy(), use_tqdm=False, priority=[0])


# Outputs.


def test_an_output_says_all_there_is_to_say(llm):
    (output,) = llm.generate("hello", greedy(logprobs=2, prompt_logprobs=1), use_tqdm=False)
    assert output.finished
    assert output.request_id
    assert output.prompt == "hello"
    assert output.prompt_token_ids == ids("hello")
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs[0] is None
    for token, entries in zip(ids("ello"), output.prompt_logprobs[1:], strict=True):
        assert next(iter(entries)) == token
        assert entries[token].decoded_token == chr(token)
        assert any(entry.rank == 1 for entry in entries.values())
    (one,) = output.outputs
    assert one.index == 0
    assert one.text == bytes(one.token_ids).decode()
    assert (one.finish_reason, one.stop_reason) == ("length", None)
    assert len(one.token_ids) == len(one.logprobs) == 12
    chosen = [entries[token] for token, entries in zip(one.token_ids, one.logprobs, strict=True)]
    assert one.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert all(entry.logprob < 0 for entry in chosen)


def test_log_probabilities_are_absent_unless_asked_for(llm):
    (output,) = llm.generate("hello", greedy(), use_tqdm=False)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_several_outputs_of_one_prompt_differ(llm):
    params = SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=8, allowed_token_ids=LETTERS)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.text for one in output.outputs}) == 3


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_the_text(llm, included):
    whole = text_of(llm, "hello")
    stop = whole[5:7]
    (output,) = llm.generate("hello", greedy(stop=stop, include_stop_str_in_output=included), use_tqdm=False)
    at = whole.index(stop)
    assert output.outputs[0].text == whole[: at + 2 if included else at]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_the_end_token_ends_the_text_unless_ignored(llm):
    params = {"allowed_token_ids": None, "logit_bias": {END: 100.0}}
    (output,) = llm.generate("hello", greedy(**params), use_tqdm=False)
    assert output.outputs[0].token_ids == [END]
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "",
        "stop",
        None,
    )
    (output,) = llm.generate("hello", greedy(ignore_eos=True, **params), use_tqdm=False)
    assert output.outputs[0].token_ids == [END] * 12
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")
    (output,) = llm.generate("hello", greedy(stop_token_ids=[END], ignore_eos=True, **params), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([END], END)


def test_without_max_tokens_an_output_ends_at_the_context(llm):
    (output,) = llm.generate(ids("x" * 250), greedy(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


def test_the_second_time_a_prompt_is_cached_and_its_output_the_same(llm):
    llm.reset_prefix_cache()
    first, second = (llm.generate("p" * 40, greedy(logprobs=0), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs == second.outputs
    assert llm.reset_prefix_cache()
    assert llm.generate("p" * 40, greedy(), use_tqdm=False)[0].num_cached_tokens == 0


def test_progress_is_shown_on_request_only(llm, capsys):
    llm.generate(["a", "b"], greedy(), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], greedy())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Processed prompts: 100%" in shown.err
    assert "2/2" in shown.err
    assert "output: " in shown.err


def test_counts_grow_with_what_was_done(llm):
    before = llm.stats()
    llm.generate(["abcd", "efg"], greedy(max_tokens=5), use_tqdm=False)
    after = llm.stats()
    assert after["n_total_prompt_tokens"] - before["n_total_prompt_tokens"] == 7
    assert after["n_total_generation_tokens"] - before["n_total_generation_tokens"] == 10


# Streams and chats.


def test_a_stream_is_the_whole_in_pieces(llm):
    assert "".join(llm.stream("hello", greedy())) == text_of(llm, "hello")


def test_closing_a_stream_frees_its_request(llm):
    stream = llm.stream("hello", greedy(max_tokens=200))
    next(stream)
    stream.close()
    assert_idle(llm.client)


def test_a_stream_is_one_text(llm):
    with pytest.raises(RequestError, match="n: got 2"):
        next(llm.stream("hello", SamplingParams(n=2)))


def test_a_chat_is_the_prompt_that_its_template_writes(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert llm.has_chat_template
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[0] == 257
    assert output.outputs[0].text == text_of(llm, {"prompt_token_ids": output.prompt_token_ids})
    assert "".join(llm.stream_chat(messages, greedy())) == output.outputs[0].text


def test_several_conversations_are_several_prompts(llm):
    one = [{"role": "user", "content": "a"}]
    other = [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    outputs = llm.chat([one, other, one], greedy(), use_tqdm=False)
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text
    assert outputs[1].prompt.count("<|im_start|>") == 3


def test_a_template_may_be_given_and_an_answer_continued(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]
    (output,) = llm.chat(messages, greedy(), use_tqdm=False, chat_template="{{ messages[0]['content'] }}!")
    assert output.prompt == "hi!"
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, greedy(), use_tqdm=False, **settings)
    assert output.prompt.endswith("<|im_start|>assistant\nwell,")


def test_a_chat_without_a_template_is_refused(tmp_path):
    with LLM(str(write_tiny_model(tmp_path, chat_template=None)), **SMALL) as llm:
        assert not llm.has_chat_template
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        with pytest.raises(RequestError, match="no chat template"):
            next(llm.stream_chat([{"role": "user", "content": "hi"}]))


# Options.


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_option_is_refused_with_its_reason(name):
    with pytest.raises(TypeError) as caught:
        LLM("no-such-model", **{name: 1})
    assert isinstance(caught.value, UnknownOption)
    assert str(REMOVED[name]) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("kv_cache_type", "kv_cache_dtype"), ("max_model_length", "max_model_len")],
)
def test_an_unknown_option_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(TypeError, match=f"option {name}: unknown; did you mean {nearest}"):
        LLM("no-such-model", **{name: 1})


def test_an_option_like_no_other_is_refused_with_all_of_them():
    with pytest.raises(UnknownOption, match="known are model, revision,"):
        LLM("no-such-model", zzz=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype: got 'int4'; needs one of auto, float32"),
        ({"compute_dtype": "float16"}, "compute_dtype"),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype: got 'fp8_e4m3'; needs one of auto, float16, float32, int8",
        ),
        ({"quantization": "awq"}, "quantization: got 'awq'"),
        ({"quantization": "bitsandbytes"}, "bitsandbytes is not in the core"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens: got 'many'"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens: got None"),
        ({"block_size": 8}, "block_size: got 8"),
        ({"block_size": 24}, "block_size: got 24; needs a multiple of 16"),
        ({"threads": True}, "threads: got True"),
        ({"max_model_len": 300}, "max_model_len: got 300; the model's own limit is 256"),
        ({"max_model_len": 1}, "max_model_len: got 1"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: got 1"),
        ({"seed": 2**63}, "seed"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"max_logprobs": -2}, "max_logprobs"),
        ({"dtype": "float16"}, 'dtype: got "float16"; tensor .* is f32'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_option_out_of_its_range_is_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **options)


def test_a_model_that_is_nowhere_is_refused():
    with pytest.raises(ModelNotFound):
        LLM("./no/such/folder")


def test_a_pool_for_less_than_the_asked_length_is_refused_with_what_fits(folder):
    with pytest.raises(OutOfPages, match="lower max_model_len to 32"):
        LLM(str(folder), kv_cache_memory_bytes=2 * 16 * 256, max_model_len=200)


def test_the_pool_sizes_the_context_where_none_was_asked_for(folder):
    with LLM(str(folder), kv_cache_memory_bytes=2 * 16 * 256, **SMALL) as llm:
        assert llm.client.max_len_tokens == 32
        with pytest.raises(PromptTooLong, match="at most 31"):
            llm.generate(ids("a" * 32), greedy(), use_tqdm=False)
        assert len(llm.generate(ids("a" * 30), greedy(), use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_without_a_tokenizer_ids_are_served_and_text_is_refused(folder):
    with LLM(str(folder), skip_tokenizer_init=True, **SMALL) as llm:
        (output,) = llm.generate(ids("hello"), greedy(logprobs=1), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].text == ""
        assert {entry.decoded_token for entries in output.outputs[0].logprobs for entry in entries.values()} == {None}
        for prompt, params in (("hello", greedy()), (ids("hello"), greedy(stop="x"))):
            with pytest.raises(RequestError, match="no tokenizer"):
                llm.generate(prompt, params, use_tqdm=False)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        with pytest.raises(ConfigError, match="tokenizer: this engine has none"):
            llm.get_tokenizer()


def test_a_checkpoint_without_a_tokenizer_serves_ids(llm, folder, tmp_path):
    bare = write_tiny_model(tmp_path / "bare", has_tokenizer=False)
    with LLM(str(bare), **SMALL) as other:
        (output,) = other.generate(ids("hello"), greedy(), use_tqdm=False)
        assert output.outputs[0].token_ids == llm.generate("hello", greedy(), use_tqdm=False)[0].outputs[0].token_ids
        # The config's end token ends it, though no tokenizer says so.
        params = greedy(allowed_token_ids=None, logit_bias={END: 100.0})
        assert other.generate(ids("a"), params, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    with LLM(str(bare), tokenizer=str(folder), **SMALL) as other:
        assert text_of(other, "hello") == text_of(llm, "hello")


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder, tmp_path):
    small = write_tiny_model(tmp_path / "small", config={"vocab_size": 200, "eos_token_id": 1}, has_tokenizer=False)
    with pytest.raises(ModelFileError, match="tokenizer: has 259 tokens; the model's vocabulary has 200"):
        LLM(str(small), tokenizer=str(folder), **SMALL)


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "none"])
def test_a_float_checkpoint_can_be_quantised_while_loading(llm, folder, quantization):
    with LLM(str(folder), quantization=quantization, **SMALL) as other:
        is_same = other.engine.plan.identity == llm.engine.plan.identity
        assert is_same == (quantization == "none")
        (output,) = other.generate("hello", greedy(logprobs=0), use_tqdm=False)
        (exact,) = llm.generate("hello", greedy(logprobs=0), use_tqdm=False)
        difference = abs(output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].logprob - exact_logprob(exact))
        assert (difference == 0.0) == is_same
        assert difference < {"none": 1e-9, "q8_0": 0.1, "q4_0": 1.0}[quantization]


def exact_logprob(output):
    return output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].logprob


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_may_have_half_precision(tmp_path, dtype):
    import ml_dtypes  # noqa: F401  numpy then knows bfloat16

    with LLM(str(write_tiny_model(tmp_path, dtype=dtype)), dtype=dtype, **SMALL) as llm:
        assert len(text_of(llm, "hello")) == 12


def test_the_models_own_sampling_defaults_are_used(folder, tmp_path):
    write_tiny_model(tmp_path)
    settings = {"temperature": 0.5, "top_k": 7, "top_p": None, "max_new_tokens": 3, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with LLM(str(tmp_path), **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 1.0, 3)
        assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "temperature", "top_k"),
    [
        ({"generation_config": "auto"}, 0.5, 7),
        ({"generation_config": "vllm"}, 1.0, 0),
        ({"generation_config": "vllm", "override_generation_config": {"top_k": 3}}, 1.0, 3),
        ({"override_generation_config": {"temperature": 0.25, "max_new_tokens": 2}}, 0.25, 7),
        ({"generation_config": "other"}, 0.75, 0),
    ],
    ids=str,
)
def test_whose_sampling_defaults_count_can_be_said(tmp_path, monkeypatch, options, temperature, top_k):
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "other").mkdir()
    for name, settings in (("tiny", {"temperature": 0.5, "top_k": 7}), ("other", {"temperature": 0.75})):
        (tmp_path / name / "generation_config.json").write_text(json.dumps(settings))
    with LLM("tiny", **options, **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (temperature, top_k)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "no/such"}, "generation_config: got 'no/such'"),
        ({"override_generation_config": {"temp": 1}}, "override_generation_config: got 'temp'; known are temperature"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature: got 'hot'; a number is needed"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p"),
        ({"override_generation_config": 1}, "override_generation_config: got 1; needs an object"),
    ],
    ids=str,
)
def test_sampling_defaults_that_cannot_be_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **options)


def test_an_engines_seed_decides_what_requests_without_one_get(folder):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    found = []
    for seed in (1, 1, 2):
        with LLM(str(folder), seed=seed, **SMALL) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(["a", "a"], params, use_tqdm=False)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2},
        {"block_size": 32},
        {"threads": 2},
        {"max_num_seqs": 1},
        {"max_model_len": 64},
    ],
    ids=str,
)
def test_options_of_size_and_schedule_change_no_output(llm, folder, options):
    prompts = ["hello", "h" * 40, "he", "hello"]
    params = greedy(logprobs=1)
    expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(folder), **(SMALL | options)) as other:
        found = other.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in found] == [output.outputs for output in expected]


def test_priorities_need_their_policy(llm, folder):
    with pytest.raises(RequestError, match="priority: got 1"):
        llm.generate("a", greedy(), use_tqdm=False, priority=1)
    with LLM(str(folder), scheduling_policy="priority", **SMALL) as other:
        outputs = other.generate(["a", "b"], greedy(), use_tqdm=False, priority=[1, -1])
        assert [output.prompt for output in outputs] == ["a", "b"]


# Ends.


def test_a_request_that_fails_harms_no_other(tmp_path):
    """One token makes the first layer overflow: who uses it fails, by name, when the others are done."""
    from safetensors.numpy import load_file, save_file

    write_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    # Column 0 of the first layer is what no token has but "!".
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.layers.0.self_attn.o_proj.weight"][0] = 0
    save_file(weights, str(tmp_path / "model.safetensors"))
    with LLM(str(tmp_path), **SMALL) as sound:
        fine = text_of(sound, "fine")
    weights["model.embed_tokens.weight"][ord("!"), 0] = 100
    for part in ("gate", "up"):
        weights[f"model.layers.0.mlp.{part}_proj.weight"][:, 0] = 3e38
    save_file(weights, str(tmp_path / "model.safetensors"))
    with LLM(str(tmp_path), **SMALL) as llm:
        with pytest.raises(RequestFailed, match="NaN"):
            llm.generate(["fine", "oh!", "also fine"], greedy(), use_tqdm=False)
        assert_idle(llm.client)
        assert text_of(llm, "fine") == fine


def n_tasks():
    """Threads of this process, native ones too."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_closing_ends_the_threads(folder):
    before = n_tasks()
    llm = LLM(str(folder), **(SMALL | {"threads": 3}))
    llm.generate([1], greedy(), use_tqdm=False)
    assert n_tasks() >= before + 3  # the engine's own computes too
    llm.close()
    llm.close()
    # A thread that was waited for is listed for some moments more.
    assert any(n_tasks() <= before for _ in range(10_000))
    for call in (lambda: llm.generate("x", use_tqdm=False), lambda: next(llm.stream("x"))):
        with pytest.raises(EngineDead, match="shut down"):
            call()


def test_a_closed_model_keeps_no_file_open(tmp_path):
    write_tiny_model(tmp_path)
    with LLM(str(tmp_path), **SMALL) as llm:
        text_of(llm, "x")
    del llm
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in read_link(link)]


def read_link(link):
    try:
        return str(link.readlink())
    except OSError:  # the folder's own, already closed
        return ""


# On an event loop.


@pytest.fixture(scope="module")
def streams(folder):
    with AsyncLLM(str(folder), **SMALL) as streams:
        yield streams
        assert_idle(streams.client)


async def collect(stream):
    return [output async for output in stream]


def test_an_event_loop_gets_the_text_as_it_comes(llm, streams):
    outputs = asyncio.run(collect(streams.generate("hello", greedy(), "mine")))
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].text == text_of(llm, "hello")
    assert all(outputs[-1].outputs[0].text.startswith(output.outputs[0].text) for output in outputs)


def test_deltas_are_the_whole_in_pieces(llm, streams):
    outputs = asyncio.run(collect(streams.generate("hello", greedy(output_kind=RequestOutputKind.DELTA))))
    assert "".join(output.outputs[0].text for output in outputs) == text_of(llm, "hello")


def test_many_streams_at_once_each_get_their_own(llm, streams):
    prompts = [f"prompt number {i}" for i in range(12)]

    async def run():
        return await asyncio.gather(*(collect(streams.generate(prompt, greedy())) for prompt in prompts))

    found = [outputs[-1].outputs[0].text for outputs in asyncio.run(run())]
    assert found == [output.outputs[0].text for output in llm.generate(prompts, greedy(), use_tqdm=False)]


def test_a_chat_streams_too(llm, streams):
    messages = [{"role": "user", "content": "hi"}]
    outputs = asyncio.run(collect(streams.chat(messages, greedy())))
    assert outputs[-1].outputs[0].text == llm.chat(messages, greedy(), use_tqdm=False)[0].outputs[0].text
    assert streams.tokenizer.vocab_size == 259


def test_a_wrong_request_is_refused_at_the_first_step(streams):
    with pytest.raises(RequestError, match="empty"):
        asyncio.run(collect(streams.generate("", greedy())))


def test_leaving_a_stream_frees_its_request(streams):
    async def run():
        stream = streams.generate("hello", greedy(max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(run())
    assert_idle(streams.client)


def test_cancelling_readers_frees_their_requests(streams):
    """So many that most still wait, whatever the machine is busy with."""

    async def run():
        started = asyncio.Event()

        async def read(prompt):
            async for _ in streams.generate(prompt, greedy(max_tokens=240)):
                started.set()

        readers = [asyncio.create_task(read(f"{i}")) for i in range(60)]
        await started.wait()
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        return [reader.cancelled() for reader in readers]

    assert any(asyncio.run(run()))
    assert_idle(streams.client)


def test_an_abort_by_name_ends_the_stream_with_its_reason(streams):
    async def run():
        outputs = []
        async for output in streams.generate("hello", greedy(max_tokens=240), "gone"):
            if not outputs:
                await streams.abort("gone")
                await streams.abort("unknown")
            outputs.append(output)
        return outputs

    outputs = asyncio.run(run())
    assert outputs[-1].finished
    # It may have ended by itself before the abort came.
    assert outputs[-1].outputs[0].finish_reason in ("abort", "length")
    assert_idle(streams.client)


def test_leaving_the_with_answers_open_streams_and_frees_everything(folder):
    n_before = len([t for t in threading.enumerate() if t.name == "tiercel-engine"])

    async def run():
        async with AsyncLLM(str(folder), **SMALL) as streams:
            assert streams.is_running
            readers = [
                asyncio.create_task(collect(streams.generate(f"p{i}", greedy(max_tokens=240)))) for i in range(6)
            ]
            first = streams.generate("now", greedy())
            await anext(first)
            await first.aclose()
        assert not streams.is_running
        return streams, await asyncio.gather(*readers, return_exceptions=True)

    streams, found = asyncio.run(run())
    for outputs in found:
        if isinstance(outputs, Exception):
            assert isinstance(outputs, EngineDead)  # it had not been sent yet
        else:
            assert outputs[-1].outputs[0].finish_reason in ("abort", "length")
    assert len([t for t in threading.enumerate() if t.name == "tiercel-engine"]) == n_before
    assert streams.client._owners == {}
    streams.client.core._scheduler.check_idle()
    streams.shutdown()


def test_tokens_that_are_named_are_told_of_as_among_all(llm):
    named = [LETTERS[9], LETTERS[0], END, LETTERS[3]]
    plain = greedy(logprobs=20, max_tokens=5, allowed_token_ids=None)
    asked = greedy(logprob_token_ids=named, max_tokens=5, allowed_token_ids=None)
    # Rows of one step have different wishes, and each gets its own.
    top, told = llm.generate(["hello", "hello"], [plain, asked], use_tqdm=False)
    assert told.outputs[0].token_ids == top.outputs[0].token_ids
    for token_id, all_of, entries in zip(
        told.outputs[0].token_ids, top.outputs[0].logprobs, told.outputs[0].logprobs, strict=True
    ):
        assert list(entries) == list(dict.fromkeys([token_id, *named]))
        assert entries[token_id] == all_of[token_id]
        assert all(entries[i].logprob == all_of[i].logprob for i in named if i in all_of)
        assert all(entries[i].rank is None for i in named if i != token_id)
    assert told.outputs[0].cumulative_logprob == top.outputs[0].cumulative_logprob


def test_more_tokens_may_be_named_than_max_logprobs(llm):
    (output,) = llm.generate("hello", greedy(logprob_token_ids=range(128), max_tokens=2), use_tqdm=False)
    assert all(len(entries) == 128 for entries in output.outputs[0].logprobs)
    assert all(set(entries) == set(range(128)) for entries in output.outputs[0].logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": range(129)}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprob_token_ids": ["a"]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs"),
    ],
)
def test_tokens_that_cannot_be_told_of_are_refused(llm, fields, param):
    with pytest.raises(RequestError) as caught:
        llm.generate("hello", SamplingParams(**fields), use_tqdm=False)
    assert caught.value.param == param


def test_a_beam_search_gives_each_prompts_likeliest_sequences(llm):
    prompts = ["hello", {"prompt_token_ids": ids("world")}]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search(prompts, params)
    assert [len(output.sequences) for output in outputs] == [3, 3]
    assert outputs == llm.beam_search(prompts, params, concurrency_limit=1)
    for prompt, output in zip(prompts, outputs, strict=True):
        sums = [one.cum_logprob for one in output.sequences]
        assert sums == sorted(sums, reverse=True)
        for one in output.sequences:
            assert one.orig_prompt == prompt
            assert one.tokens[:5] == ids("hello" if prompt == "hello" else "world")
            assert one.text.startswith("hello" if prompt == "hello" else "world")
            assert len(one.logprobs) == len(one.tokens) - 5 == 6
            chosen = [entries[i] for i, entries in zip(one.tokens[5:], one.logprobs, strict=True)]
            assert sum(entry.logprob for entry in chosen) == pytest.approx(one.cum_logprob)
            assert all(len(entries) == 6 for entries in one.logprobs)


def test_a_beams_sum_is_what_scoring_the_same_tokens_gives(llm):
    (output,) = llm.beam_search("hello", BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    for one in output.sequences:
        (scored,) = llm.generate([one.tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        entries = [entries[i] for i, entries in zip(one.tokens[5:], scored.prompt_logprobs[5:], strict=True)]
        assert one.cum_logprob == sum(entry.logprob for entry in entries)


def test_a_beam_search_of_width_one_is_greedy(llm):
    (output,) = llm.beam_search("hello", BeamSearchParams(beam_width=1, max_tokens=20))
    (plain,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert output.sequences[0].tokens[5:] == plain.outputs[0].token_ids
    assert output.sequences[0].text == "hello" + plain.outputs[0].text


def test_a_beam_search_of_other_things_is_refused(llm):
    with pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search("hello", SamplingParams())
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=2), concurrency_limit=0)
    with pytest.raises(PromptTooLong):
        llm.beam_search("x" * 100_000, BeamSearchParams(beam_width=2, max_tokens=2))
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=2)) == []
