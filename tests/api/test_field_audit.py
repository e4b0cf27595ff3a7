"""Every field that clients of vLLM send to chats and completions, and how it is honoured or refused: none is ignored.

`Engine` fields reach the engine as they are, as a rendered request shows; `Prompt` fields change the prompt; `Answer`
fields change the answer; `Label` fields never change one, and are taken at any value; `Refused` ones are named.
`Elsewhere` names the test that shows it.
"""

import json
from pathlib import Path

import pytest
from kit import Rig
from scripted import CHAT, COMPLETE, MARKS, TEMPLATE, TOOLS, byte_tokenizer

from tiercel.api.http.schema import FREE, NO_OPS, ChatRequest, CompletionRequest

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]


class Engine:
    def __init__(self, value, arrives=None, **base):
        self.value, self.base = value, base
        self.arrives = value if arrives is None else arrives


class Prompt:
    def __init__(self, value, **base):
        self.value, self.base = value, base


class Answer(Prompt):
    pass


class Label:
    def __init__(self, *values):
        self.values = values


class Elsewhere:
    def __init__(self, file, test):
        self.file, self.test = file, test


class Refused:
    def __init__(self, value, param=None, **base):
        self.value, self.param, self.base = value, param, base


BOTH = {
    "model": Refused("another", "model"),
    "stream": Answer(True),
    "stream_options": Answer({"include_usage": True, "continuous_usage_stats": True}, stream=True),
    "n": Engine(2, temperature=1),
    "temperature": Engine(0.5),
    "top_p": Engine(0.5),
    "top_k": Engine(7),
    "min_p": Engine(0.25),
    "presence_penalty": Engine(0.5),
    "frequency_penalty": Engine(0.5),
    "repetition_penalty": Engine(1.5),
    "seed": Engine(9),
    "stop": Engine("x", ["x"]),
    "stop_token_ids": Engine([70]),
    "include_stop_str_in_output": Engine(True),
    "ignore_eos": Engine(True),
    "min_tokens": Engine(3),
    "max_tokens": Engine(5),
    "skip_special_tokens": Engine(False),
    "spaces_between_special_tokens": Engine(False),
    "logit_bias": Engine({"5": 1.5}),
    "allowed_token_ids": Engine([70, 71]),
    "bad_words": Engine(["no"]),
    "response_format": Engine({"type": "json_object"}, Ellipsis),
    "structured_outputs": Engine({"regex": "a+"}),
    "thinking_token_budget": Engine(5),
    "repetition_detection": Engine({"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}),
    "stream_interval": Engine(3),
    "prompt_logprobs": Engine(1),
    "logprob_token_ids": Engine([70, 71]),
    "use_beam_search": Answer(True, n=2),
    "length_penalty": Elsewhere("test_http_beams.py", "test_a_length_penalty_below_zero_favours_short_answers"),
    "truncate_prompt_tokens": Prompt(1),
    "truncation_side": Prompt("right", truncate_prompt_tokens=1),
    "add_special_tokens": Prompt(True),
    "priority": Refused(1),
    "cache_salt": Refused(""),
    "request_id": Answer("mine"),
    "session_id": Label("s"),
    "user": Label("u"),
    "return_tokens_as_token_ids": Answer(True, **{"logprob_token_ids": [70]}),
    "return_token_ids": Answer(True),
    "routed_experts_prompt_start": Refused(1),
    "kv_transfer_params": Engine({"max_offload_tokens": 5}, {"kv_load_tiers": None, "max_offload_tokens": 5}),
    "cache_hint": Engine({"pin": True}, {"pin": True, "ttl_s": None}),
    "ec_transfer_params": Refused({"a": 1}),
    "vllm_xargs": Refused({"a": 1}),
    "best_of": Refused(2),
}
CHATS = BOTH | {
    "messages": Prompt(SAID),
    "max_completion_tokens": Answer(3),
    "logprobs": Answer(True),
    "top_logprobs": Answer(2, logprobs=True),
    "truncation_side": Prompt("right", truncate_prompt_tokens=3),
    "echo": Answer(True, messages=SAID, continue_final_message=True, add_generation_prompt=False),
    "add_generation_prompt": Prompt(False),
    "continue_final_message": Prompt(True, messages=SAID, add_generation_prompt=False),
    "documents": Prompt([{"text": "d"}]),
    "chat_template": Refused("{{ messages }}"),
    "chat_template_kwargs": Prompt({"opens": True}),
    "reasoning_effort": Prompt("low"),
    "include_reasoning": Answer(False, chat_template_kwargs={"opens": True}),
    "tools": Prompt(TOOLS),
    "tool_choice": Answer("required", tools=TOOLS, max_tokens=60),
    "parallel_tool_calls": Elsewhere("test_tools.py", "test_without_parallel_calls_only_the_first_is_given"),
    "skip_special_tokens": Answer(False, max_tokens=200, seed=4),
    "return_prompt_text": Answer(True),
    "return_token_offsets": Refused(True),
    "return_assistant_tokens_mask": Refused(True),
    "media_io_kwargs": Refused({"image": {}}),
    "mm_processor_kwargs": Refused({"a": 1}),
    "functions": Refused([]),
    "function_call": Refused("auto"),
    "modalities": Refused(["audio"]),
    "audio": Refused({"voice": "x"}),
    "store": Refused(True),
    "metadata": Label({"a": "b"}),
    "service_tier": Refused("flex"),
    "verbosity": Refused("low"),
    "prediction": Refused({"type": "content"}),
    "web_search_options": Refused({"a": 1}),
    "prompt_cache_key": Label("k"),
    "safety_identifier": Label("k"),
}
COMPLETIONS = BOTH | {
    "prompt": Prompt("other"),
    "suffix": Refused("x"),
    "prompt_embeds": Refused("AAAA"),
    "logprobs": Answer(2),
    "echo": Answer(True),
    "add_special_tokens": Prompt(False),
}
ROUTES = {CHAT: (ChatRequest, CHATS), COMPLETE: (CompletionRequest, COMPLETIONS)}
ROWS = [(path, name, row) for path, (_, table) in ROUTES.items() for name, row in table.items()]


def rows_of(*kinds):
    rows = [(path, name, row) for path, name, row in ROWS if type(row) in kinds]
    return pytest.mark.parametrize(
        ("path", "name", "row"),
        rows,
        ids=[f"{'chat' if path == CHAT else 'completion'}-{name}" for path, name, _ in rows],
    )


@pytest.fixture(scope="module")
def shared():
    template = "Chat: " + TEMPLATE + "{% if documents %}{{ documents | length }}{% endif %}{{ reasoning_effort or '' }}"
    rig = Rig(tokenizer=lambda: byte_tokenizer(template, MARKS, add_bos=True), limits={"vocab_size": 320})
    yield rig
    rig.close()


def body_of(path, **fields):
    plain = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hello"}
    return plain | {"max_tokens": 12, "seed": 3} | fields


def answer_of(rig, path, **fields):
    """Give what a client is told, without what is new each time."""
    response = rig.ask("POST", path, json=body_of(path, **fields))
    assert response.status_code == 200, response.text
    text = response.text
    if fields.get("stream"):
        return [
            json.loads(one[6:]) | {"id": "", "created": 0} for one in text.split("\n\n") if one.startswith("data: {")
        ]
    answer = response.json()
    is_own = answer["id"].endswith("-mine")
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            call["id"] = ""
    del answer["usage"]["prompt_tokens_details"]
    return answer | {"id": "mine" if is_own else "", "created": 0}


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_that_a_request_may_hold_is_in_the_table(path):
    struct, table = ROUTES[path]
    assert set(struct.__struct_fields__) <= set(table)
    assert set(table) <= {*struct.__struct_fields__, *NO_OPS, *FREE}


@rows_of(Engine)
def test_a_field_for_the_engine_arrives_there(rig, path, name, row):
    asked = body_of(path, **row.base, **{name: row.value})
    rendered = rig.post(path + "/render", asked)
    rendered = rendered if path == CHAT else rendered[0]
    field = "structured_outputs" if name == "response_format" else name
    plain = rig.post(path + "/render", body_of(path, **row.base))
    plain = plain if path == CHAT else plain[0]
    arrived = rendered["sampling_params"][field]
    assert row.arrives is Ellipsis or arrived == row.arrives
    assert arrived != plain["sampling_params"].get(field)


@rows_of(Prompt)
def test_a_field_of_the_prompt_changes_it(rig, path, name, row):
    def ids(**fields):
        rendered = rig.post(path + "/render", body_of(path, **row.base | fields))
        return rendered["token_ids"] if path == CHAT else rendered[0]["token_ids"]

    assert ids(**{name: row.value}) != ids()


@rows_of(Answer)
def test_a_field_of_the_answer_changes_it(rig, path, name, row):
    fields = {"ignore_eos": True} | row.base
    assert answer_of(rig, path, **fields | {name: row.value}) != answer_of(rig, path, **fields)


@rows_of(Label)
def test_a_label_changes_nothing(rig, path, name, row):
    for value in row.values:
        assert answer_of(rig, path, **{name: value}) == answer_of(rig, path)


@rows_of(Elsewhere)
def test_what_is_shown_elsewhere_is_there(path, name, row):
    text = (Path(__file__).parent / row.file).read_text()
    assert f"def {row.test}(" in text
    assert name in text


@rows_of(Refused)
def test_a_field_that_cannot_be_kept_to_is_refused_by_its_name(rig, path, name, row):
    status = 404 if name == "model" else 400
    error = rig.refused(path, body_of(path, **row.base, **{name: row.value}), status)
    assert error["param"] == name
    assert error["message"].startswith(name)


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_the_same_as_leaving_a_field_out(rig, path):
    _, table = ROUTES[path]
    nothing = {name: None for name in table if name not in ("messages", "prompt", "max_tokens", "seed")}
    assert answer_of(rig, path, **nothing) == answer_of(rig, path)
