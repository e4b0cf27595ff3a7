"""Routes of models that embed and score: requests are checked, and refused as long as there is no such model."""

import pytest
from kit import error_of

EMBED = ("/v1/embeddings", "/pooling", "/classify")
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


@pytest.mark.parametrize(
    ("paths", "body"),
    [
        (EMBED, {"input": "x"}),
        (EMBED, {"input": ["x", "y"], "model": "tiny", "user": "u", "truncate_prompt_tokens": -1}),
        (EMBED, {"input": [1, 2]}),
        (EMBED, {"input": [[1, 2], [3]]}),
        (EMBED, {"messages": [{"role": "user", "content": "x"}]}),
        (EMBED[:2], {"input": "x", "encoding_format": "base64", "dimensions": 8}),
        (EMBED[1:2], {"input": "x", "task": "embed"}),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
        (SCORE, {"queries": ["a", "b"], "documents": ["c", "d"]}),
        (SCORE, {"queries": "a", "items": ["b"]}),
        (RERANK, {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ],
)
def test_a_good_request_is_told_that_there_is_no_such_model(rig, paths, body):
    for path in paths:
        error = rig.refused(path, body, 501)
        assert error["type"] == "NotImplementedError"
        assert path in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBED[0], {}, "input"),
        (EMBED[0], {"input": "x", "messages": []}, "input"),
        (EMBED[0], {"messages": []}, "messages"),
        (EMBED[0], {"input": ""}, "input"),
        (EMBED[0], {"input": []}, "input"),
        (EMBED[0], {"input": ["x", ""]}, "input"),
        (EMBED[0], {"input": ["x", 1]}, "input"),
        (EMBED[0], {"input": {"a": 1}}, "input"),
        (EMBED[0], {"input": ["x"] * 1025}, "input"),
        (EMBED[0], {"input": "x", "dimensions": 0}, "dimensions"),
        (EMBED[0], {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        (EMBED[0], {"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (EMBED[0], {"input": "x", "inputs": "y"}, "inputs"),
        (EMBED[1], {"input": "x", "task": "encode"}, "task"),
        (SCORE[0], {"text_1": "a"}, "queries"),
        (SCORE[0], {"text_1": "a", "documents": ["b"]}, "queries"),
        (SCORE[0], {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE[0], {"queries": "a", "documents": []}, "queries"),
        (SCORE[0], {"queries": "a", "documents": ["b"] * 1025}, "documents"),
        (RERANK[0], {"documents": ["b"]}, "query"),
        (RERANK[0], {"query": "a", "documents": []}, "documents"),
        (RERANK[0], {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (RERANK[0], {"query": "a", "documents": ["b"], "top_n": True}, "top_n"),
    ],
)
def test_a_bad_request_is_refused_by_its_field(rig, path, body, param):
    assert rig.refused(path, body)["param"] == param


def test_another_model_is_not_found(rig):
    response = rig.ask("POST", "/v1/embeddings", json={"input": "x", "model": "other"})
    assert error_of(response.json(), 404)["param"] == "model"
