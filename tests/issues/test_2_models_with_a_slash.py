"""GET /v1/models/ described a model whose name is empty; it lists the models now."""

import asyncio
import json
from types import SimpleNamespace

from tiercel.api.http.models import one_model


def test_the_list_with_a_slash_is_the_list():
    settings = SimpleNamespace(served_names=("a", "b"), model_id="a")
    service = SimpleNamespace(settings=settings, created_s=1, engine=SimpleNamespace(max_model_len=8))
    answer = asyncio.run(one_model(SimpleNamespace(path_params={"name": ""}), service))
    assert [one["id"] for one in json.loads(answer.body)["data"]] == ["a", "b"]
