"""Contradictions between fields of one request, each refused by the field to change: those that vLLM refuses too."""

import json

import pytest
from scripted import CHAT, HI, TOOLS

COMPLETE = "/v1/completions"
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": "1", "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"choice": ["a"]}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"json": {}}}, "tool_choice"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1}, "priority"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_chat_that_contradicts_itself_is_refused_by_its_field(rig, fields, param):
    assert rig.refused(CHAT, {"messages": HI} | fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": True, "echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "use_beam_search": True}, "stream"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_completion_that_contradicts_itself_is_refused_by_its_field(rig, fields, param):
    assert rig.refused(COMPLETE, {"prompt": "x"} | fields)["param"] == param
