"""The answers of `pooling`, in the shapes of OpenAI's embeddings and of vLLM's other routes. Knows no engine."""

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiercel.protocol.pooling import PoolingOutput, PoolingRequestOutput, cosine

if TYPE_CHECKING:
    import numpy as np

    from tiercel.engine.client import PreparedPooling
    from tiercel.models.pooling import PoolingSpec
    from tiercel.protocol.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what the engine gave for each of its texts."""

    ask: Any
    request_id: str
    model: str
    created_s: int
    ready: "list[tuple[PreparedPooling | None, RequestOutput]]"
    spec: "PoolingSpec"

    def outputs(self) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each text's rows. Cost: of the order of the rows; not for an event loop."""
        return [prepared.finish(output) for prepared, output in self.ready if prepared is not None]

    def around(self, stem: str, data: list[dict[str, Any]]) -> dict[str, Any]:
        """Put what all answers have around the data."""
        n_tokens = sum(len(output.prompt_token_ids) for _, output in self.ready)
        return {
            "id": f"{stem}-{self.request_id}",
            "object": "list",
            "created": self.created_s,
            "model": self.model,
            "data": data,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0},
        }


def embeddings(asked: Asked) -> dict[str, Any]:
    """Write the answer of /v1/embeddings."""
    data = [
        {"index": i, "object": "embedding", "embedding": _encoded(asked.ask, one.outputs.data)}
        for i, one in enumerate(asked.outputs())
    ]
    return asked.around("embd", data)


def pooling(asked: Asked) -> dict[str, Any]:
    """Write the answer of /pooling."""
    data = [
        {"index": i, "object": "pooling", "data": _encoded(asked.ask, one.outputs.data)}
        for i, one in enumerate(asked.outputs())
    ]
    return asked.around("pool", data)


def classes(asked: Asked) -> dict[str, Any]:
    """Write the answer of /classify."""
    data = []
    for i, one in enumerate(asked.outputs()):
        probs = one.outputs.data.tolist()
        label = asked.spec.labels[probs.index(max(probs))]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return asked.around("classify", data)


def scores(asked: Asked) -> dict[str, Any]:
    """Write the answer of /score."""
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(_scores(asked))]
    return asked.around("score", data)


def ranks(asked: Asked) -> dict[str, Any]:
    """Write the answer of /rerank: the best first, of equals the one that came first."""
    values = _scores(asked)
    best = sorted(range(len(values)), key=lambda i: -values[i])
    with_text = asked.ask.return_documents is not False
    results: list[dict[str, Any]] = []
    for i in best[: asked.ask.top_n or None]:
        text = {"document": {"text": asked.ask.documents[i]}} if with_text else {}
        results.append({"index": i, **text, "relevance_score": values[i]})
    answer = asked.around("rerank", [])
    return {name: answer[name] for name in ("id", "model", "usage")} | {"results": results}


def _scores(asked: Asked) -> list[float]:
    outputs = asked.outputs()
    if "classify" in asked.spec.tasks:
        return [float(one.outputs.data[0]) for one in outputs]
    n = len(outputs) // 2
    return [cosine(outputs[i].outputs.data, outputs[n + i].outputs.data) for i in range(n)]


def _encoded(ask: Any, data: "np.ndarray") -> Any:
    if ask.encoding_format != "base64":
        return data.tolist()
    if ask.embed_dtype == "bfloat16":
        import ml_dtypes

        data = data.astype(ml_dtypes.bfloat16)
    elif ask.embed_dtype == "float16":
        data = data.astype("float16")
    # In the machine's order, which is little-endian wherever Tiercel runs.
    raw = data.byteswap() if ask.endianness == "big" else data
    return base64.b64encode(raw.tobytes()).decode()
