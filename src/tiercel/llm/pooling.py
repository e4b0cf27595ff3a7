"""The half of `LLM` that pools: embed, classify, score, encode and reward, with vLLM's names and outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from tiercel.base.errors import RequestError, TiercelError
from tiercel.protocol.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
)

if TYPE_CHECKING:
    from tiercel.engine.client import EngineClient
    from tiercel.engine.prompts import Prompt

Task = Literal["embed", "classify", "token_embed", "token_classify"]
Params = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


def with_task(params: Params, task: Task | None) -> PoolingParams | list[PoolingParams]:
    """Return the parameters for a task.

    Raises:
        RequestError: they name another one.
    """

    def one(given: PoolingParams) -> PoolingParams:
        if not isinstance(given, PoolingParams):
            raise RequestError(
                f"pooling_params: got {type(given).__name__}; PoolingParams is needed, or a list of them, one a prompt",
                param="pooling_params",
            )
        if task is not None and given.task not in (None, task):
            raise RequestError(f"task: got {given.task!r} where {task} is done; leave it out", param="task")
        return given if task is None else msgspec.structs.replace(given, task=task)

    if params is None or isinstance(params, PoolingParams):
        return one(params or PoolingParams())
    return [one(given) for given in params]


def pool(
    client: "EngineClient", prompts: "Sequence[tuple[Prompt, str | None]]", params: Params, task: Task | None
) -> list[Pooled]:
    """Pool texts, each with the second of a pair or None, in their order.

    Raises:
        RequestError: one is refused, before any is run; the message names its index.
        RequestFailed: one could not be finished; the others were.
    """
    outputs: dict[int, Pooled] = {}
    failure: TiercelError | None = None
    for i, result in client.pool_many(prompts, with_task(params, task)):
        if isinstance(result, TiercelError):
            failure = failure or result
        else:
            outputs[i] = result
    if failure is not None:
        raise failure
    return [outputs[i] for i in range(len(prompts))]


def as_embedding(one: Pooled) -> EmbeddingRequestOutput:
    """Return a pooled text as its vector."""
    return PoolingRequestOutput(
        one.request_id, EmbeddingOutput(one.outputs.data.tolist()), one.prompt_token_ids, one.num_cached_tokens
    )


def as_classes(one: Pooled) -> ClassificationRequestOutput:
    """Return a pooled text as its labels' numbers."""
    return PoolingRequestOutput(
        one.request_id, ClassificationOutput(one.outputs.data.tolist()), one.prompt_token_ids, one.num_cached_tokens
    )


def score(
    client: "EngineClient", firsts: Sequence[str], seconds: Sequence[str], params: Params
) -> list[ScoringRequestOutput]:
    """Score pairs: by a classifier of pairs with one label, else by the cosine of two embeddings.

    Raises: as `pool`; RequestError also when the model does neither.
    """
    assert len(firsts) == len(seconds)
    tasks = () if client.pooler is None else client.pooler.spec.tasks
    if "classify" in tasks:
        assert client.pooler is not None
        n_labels = client.pooler.width
        if n_labels != 1:
            raise RequestError(
                f"model: it has {n_labels} labels; one is needed to score pairs; use classify", param="model"
            )
        pooled = pool(client, list(zip(firsts, seconds, strict=True)), params, "classify")
        return [_scored(one, float(one.outputs.data[0]), one.prompt_token_ids) for one in pooled]
    unlike = list(dict.fromkeys([*firsts, *seconds]))
    vectors = dict(zip(unlike, pool(client, [(text, None) for text in unlike], params, "embed"), strict=True))
    result = []
    for a, b in zip(firsts, seconds, strict=True):
        ids = [*vectors[a].prompt_token_ids, *vectors[b].prompt_token_ids]
        result.append(_scored(vectors[b], cosine(vectors[a].outputs.data, vectors[b].outputs.data), ids))
    return result


def _scored(one: Pooled, value: float, ids: list[int]) -> ScoringRequestOutput:
    return PoolingRequestOutput(one.request_id, ScoringOutput(value), ids, one.num_cached_tokens)
