"""Decoders that pool: embedders, sequence classifiers and reward models over the causal decoders of this package.

The last token has seen the whole text, so its row stands for it. Prompts may be computed in chunks and found in the
cache. A checkpoint of the backbone alone names its tensors without `model.`; `boot` puts it before them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec

from tiercel.models.decoder import Decoder
from tiercel.models.fields import ConfigFields
from tiercel.models.info import ModelInfo
from tiercel.models.llama import Llama, Mistral
from tiercel.models.model import Model
from tiercel.models.pooling import PoolingSpec, read_activation, read_dimensions, read_labels
from tiercel.models.qwen import Qwen2, Qwen3
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

_OWN_FIELDS = (
    "is_matryoshka",
    "matryoshka_dimensions",
    "num_labels",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)


class PooledDecoder(Decoder):
    """A decoder whose rows are its final hidden states. `base` is the decoder that reads the config."""

    base: ClassVar[type[Decoder]]
    architecture: ClassVar[str]
    spec: PoolingSpec

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a config; see `Model.from_config`."""
        fields = ConfigFields(config)
        spec = cls.read_spec(config, fields)
        backbone = {name: value for name, value in config.items() if name not in _OWN_FIELDS}
        self = cls(cls.base.from_config(backbone).config)
        self.spec = spec
        return self

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: hidden states, of which the last stands for the text."""
        del config
        return PoolingSpec(tasks=("embed", "token_embed"), method="last", dimensions=read_dimensions(fields))

    @property
    def pooling(self) -> PoolingSpec:
        """How rows become answers."""
        return self.spec

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return msgspec.structs.replace(super().info, architecture=self.architecture)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the forward pass reads, by canonical name."""
        shapes = super().expected_weights()
        shapes.pop("lm_head.weight", None)
        return shapes | self.head_weights()

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what follows the decoder."""
        return {}

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: a language head too."""
        return name == "lm_head.weight" or super().may_ignore(name)

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write what follows the decoder."""
        del rec
        return x


class DecoderClassifier(PooledDecoder):
    """A decoder with a matrix of labels over its last token."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: logits of the labels."""
        labels = read_labels(config, fields)
        activation = read_activation(fields, len(labels))
        return PoolingSpec(tasks=("classify",), method="last", activation=activation, labels=labels)

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the labels' matrix."""
        return {"score.weight": (len(self.spec.labels), self.config.hidden_size)}

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write the labels' logits."""
        return rec.linear(x, "score.weight")


class DecoderReward(PooledDecoder):
    """A decoder that rates each token: dense, relu, dense."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: one number of each token."""
        del config, fields
        return PoolingSpec(tasks=("token_classify",), method="last", activation="sigmoid", labels=("reward",))

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the two layers."""
        e = self.config.hidden_size
        return {"score.0.weight": (e, e), "score.0.bias": (e,), "score.2.weight": (1, e), "score.2.bias": (1,)}

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write the two layers."""
        x = rec.activate(rec.linear(x, "score.0.weight", bias="score.0.bias"), "relu")
        return rec.linear(x, "score.2.weight", bias="score.2.bias")


def _of(kind: type[PooledDecoder], base: type[Decoder], architecture: str) -> type[Model]:
    own = {"base": base, "architecture": architecture, "norms_add_one": base.norms_add_one}
    return type(architecture, (kind,), own | {"__doc__": kind.__doc__})


POOLED_DECODERS: Mapping[str, type[Model]] = {
    **{
        f"{name}Model": _of(PooledDecoder, base, f"{name}Model")
        for name, base in (("Llama", Llama), ("Mistral", Mistral), ("Qwen2", Qwen2), ("Qwen3", Qwen3))
    },
    **{
        f"{name}ForSequenceClassification": _of(DecoderClassifier, base, f"{name}ForSequenceClassification")
        for name, base in (("Llama", Llama), ("Mistral", Mistral), ("Qwen2", Qwen2), ("Qwen3", Qwen3))
    },
    "Qwen2ForRewardModel": _of(DecoderReward, Qwen2, "Qwen2ForRewardModel"),
}
"""Architecture name, as configs have it, to the class that reads and records it."""
