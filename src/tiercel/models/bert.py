"""BERT and RoBERTa: encoders whose tokens see the whole text, for embedding, classifying and scoring pairs.

x = LN(word + position + segment); in each layer x = LN(x + dense(attention(x))), x = LN(x + dense(act(dense x))). All
with biases. Nothing is kept from a step: a text is computed whole. Source: Devlin et al. 2018 (arXiv:1810.04805); Liu
et al. 2019 (arXiv:1907.11692), whose positions begin behind the padding's id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from tiercel.models.decoder import read_n_layers
from tiercel.models.fields import ConfigFields
from tiercel.models.info import ModelInfo
from tiercel.models.model import Model, RecordOptions
from tiercel.models.pooling import PoolingSpec, read_activation, read_dimensions, read_labels
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Every number and switch of an encoder that changes its arithmetic."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_positions: int
    first_position: int
    n_segments: int
    eps: float
    act: str
    spec: PoolingSpec


class Bert(Model):
    """The encoder alone, for embeddings. Subclasses add a head."""

    architecture: ClassVar[str] = "BertModel"
    prefix: ClassVar[str] = ""
    is_roberta: ClassVar[bool] = False

    def __init__(self, config: BertConfig) -> None:
        self.config = config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a config; see `Model.from_config`."""
        fields = ConfigFields(config)
        fields.only("quantization_config", why="encoders are read in float formats")
        fields.only("position_embedding_type", "absolute", why="only absolute positions are implemented")
        fields.raw("tie_word_embeddings")  # there is no language head
        fields.only("is_decoder", False, why="only encoders are implemented")
        fields.only("add_cross_attention", False, why="only encoders are implemented")
        hidden, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        if hidden % n_heads:
            raise fields.broken("hidden_size", hidden, f"a multiple of num_attention_heads {n_heads}")
        act = fields.raw("hidden_act")
        if act is not None and act not in _ACTIVATIONS:
            raise fields.refused("hidden_act", act, f"the known activations are {', '.join(_ACTIVATIONS)}")
        pad_id = fields.raw("pad_token_id")
        first = (1 if pad_id is None else pad_id) + 1 if cls.is_roberta else 0
        n_positions = fields.size("max_position_embeddings")
        if type(first) is not int or not 0 <= first < n_positions:
            raise fields.broken("pad_token_id", pad_id, f"an id below max_position_embeddings {n_positions}")
        result = BertConfig(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            n_layers=read_n_layers(fields),
            n_heads=n_heads,
            n_positions=n_positions,
            first_position=first,
            n_segments=fields.size("type_vocab_size", 2),
            eps=fields.float32("layer_norm_eps", 1e-12),
            act=_ACTIVATIONS[act or "gelu"],
            spec=cls.read_spec(config, fields),
        )
        fields.finish()
        return cls(result)

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: hidden states, of which the first stands for the text."""
        del config
        return PoolingSpec(tasks=("embed", "token_embed"), method="cls", dimensions=read_dimensions(fields))

    @property
    def pooling(self) -> PoolingSpec:
        """How rows become answers."""
        return self.config.spec

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        c = self.config
        n_parameters = sum(prod(shape) for shape in self.expected_weights().values())
        max_len = c.n_positions - c.first_position
        return ModelInfo(self.architecture, c.vocab_size, c.hidden_size, max_len, n_parameters, ())

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the forward pass reads, by canonical name."""
        c = self.config
        e, f = c.hidden_size, c.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (c.vocab_size, e),
            "embeddings.position_embeddings.weight": (c.n_positions, e),
            "embeddings.token_type_embeddings.weight": (c.n_segments, e),
            "embeddings.LayerNorm.weight": (e,),
            "embeddings.LayerNorm.bias": (e,),
        }
        dense = {
            "attention.self.query": (e, e),
            "attention.self.key": (e, e),
            "attention.self.value": (e, e),
            "attention.output.dense": (e, e),
            "intermediate.dense": (f, e),
            "output.dense": (e, f),
        }
        for i in range(c.n_layers):
            for name, (n, k) in dense.items():
                shapes[f"encoder.layer.{i}.{name}.weight"] = (n, k)
                shapes[f"encoder.layer.{i}.{name}.bias"] = (n,)
            for name in ("attention.output.LayerNorm", "output.LayerNorm"):
                shapes[f"encoder.layer.{i}.{name}.weight"] = (e,)
                shapes[f"encoder.layer.{i}.{name}.bias"] = (e,)
        return {self.prefix + name: shape for name, shape in shapes.items()} | self.head_weights()

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what follows the encoder."""
        return {}

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: numbered positions, and a pooler that no embedding uses."""
        unread = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.")
        return name.removeprefix(self.prefix).startswith(unread)

    def forward(self, rec: Recorder, options: RecordOptions) -> Value:
        """Write one step in ops and return its rows."""
        del options
        c, p = self.config, self.prefix
        x = rec.embed(f"{p}embeddings.word_embeddings.weight")
        x = rec.add(x, rec.embed_rows(f"{p}embeddings.token_type_embeddings.weight", "segment"))
        position = f"{p}embeddings.position_embeddings.weight"
        x = rec.add(x, rec.embed_rows(position, "position", first=c.first_position))
        x = self._norm(rec, x, f"{p}embeddings.LayerNorm")
        for i in range(c.n_layers):
            x = self._layer(rec, x, f"{p}encoder.layer.{i}")
        return self.head(rec, rec.select_rows(x))

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write what follows the encoder."""
        del rec
        return x

    def _layer(self, rec: Recorder, x: Value, prefix: str) -> Value:
        c = self.config
        d = c.hidden_size // c.n_heads
        q, k, v = (_dense(rec, x, f"{prefix}.attention.self.{name}") for name in ("query", "key", "value"))
        scale = float(np.float64(d) ** -0.5)
        y = rec.sequence_attention(q, k, v, heads=c.n_heads, kv_heads=c.n_heads, head_dim=d, scale=scale)
        x = rec.add(x, _dense(rec, y, f"{prefix}.attention.output.dense"))
        x = self._norm(rec, x, f"{prefix}.attention.output.LayerNorm")
        h = rec.activate(_dense(rec, x, f"{prefix}.intermediate.dense"), c.act)
        x = rec.add(x, _dense(rec, h, f"{prefix}.output.dense"))
        return self._norm(rec, x, f"{prefix}.output.LayerNorm")

    def _norm(self, rec: Recorder, x: Value, name: str) -> Value:
        return rec.layer_norm(x, f"{name}.weight", f"{name}.bias", self.config.eps)


class BertForSequenceClassification(Bert):
    """BERT that gives a label of a text, or scores a pair: tanh(dense x) of the first token, then the labels."""

    architecture = "BertForSequenceClassification"
    prefix = "bert."

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: logits of the labels."""
        labels = read_labels(config, fields)
        activation = read_activation(fields, len(labels))
        return PoolingSpec(tasks=("classify",), method="cls", activation=activation, labels=labels)

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of pooler and classifier."""
        e, n = self.config.hidden_size, len(self.config.spec.labels)
        return {
            f"{self.prefix}pooler.dense.weight": (e, e),
            f"{self.prefix}pooler.dense.bias": (e,),
            "classifier.weight": (n, e),
            "classifier.bias": (n,),
        }

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write pooler and classifier."""
        x = rec.activate(_dense(rec, x, f"{self.prefix}pooler.dense"), "tanh")
        return _dense(rec, x, "classifier")


class BertForTokenClassification(BertForSequenceClassification):
    """BERT that gives a label of each token."""

    architecture = "BertForTokenClassification"

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], fields: ConfigFields) -> PoolingSpec:
        """Say what the rows are: logits of the labels, of each token."""
        return PoolingSpec(tasks=("token_classify",), method="cls", labels=read_labels(config, fields))

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the classifier."""
        e, n = self.config.hidden_size, len(self.config.spec.labels)
        return {"classifier.weight": (n, e), "classifier.bias": (n,)}

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write the classifier."""
        return _dense(rec, x, "classifier")


class Roberta(Bert):
    """RoBERTa and XLM-RoBERTa, for embeddings."""

    architecture = "RobertaModel"
    is_roberta = True


class RobertaForSequenceClassification(BertForSequenceClassification):
    """RoBERTa that gives a label of a text, or scores a pair."""

    architecture = "RobertaForSequenceClassification"
    prefix = "roberta."
    is_roberta = True

    def head_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head."""
        e, n = self.config.hidden_size, len(self.config.spec.labels)
        return {
            "classifier.dense.weight": (e, e),
            "classifier.dense.bias": (e,),
            "classifier.out_proj.weight": (n, e),
            "classifier.out_proj.bias": (n,),
        }

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write the head."""
        return _dense(rec, rec.activate(_dense(rec, x, "classifier.dense"), "tanh"), "classifier.out_proj")


def _dense(rec: Recorder, x: Value, name: str) -> Value:
    return rec.linear(x, f"{name}.weight", bias=f"{name}.bias")
