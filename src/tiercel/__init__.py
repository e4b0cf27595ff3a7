"""Tiercel: an inference and serving engine for language models.

`LLM` runs a model inside this process, `AsyncLLM` streams from it, `SamplingParams` says how tokens are chosen; names
and meanings are vLLM's. Names are resolved on first use, so that `import tiercel` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.llm.async_llm import AsyncLLM
    from tiercel.llm.llm import LLM
    from tiercel.protocol.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from tiercel.protocol.outputs import CompletionOutput, Logprob, RequestOutput
    from tiercel.protocol.params import RequestOutputKind, SamplingParams
    from tiercel.protocol.structured import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "tiercel.llm.llm",
    "AsyncLLM": "tiercel.llm.async_llm",
    "BeamSearchOutput": "tiercel.protocol.beams",
    "BeamSearchParams": "tiercel.protocol.beams",
    "BeamSearchSequence": "tiercel.protocol.beams",
    "SamplingParams": "tiercel.protocol.params",
    "StructuredOutputsParams": "tiercel.protocol.structured",
    "RequestOutputKind": "tiercel.protocol.params",
    "RequestOutput": "tiercel.protocol.outputs",
    "CompletionOutput": "tiercel.protocol.outputs",
    "Logprob": "tiercel.protocol.outputs",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
