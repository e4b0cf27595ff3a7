"""What a pooling model's rows are, and how they become its answer. Knows no rows; `engine.pooling` computes with it."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tiercel.models.fields import ConfigFields

Method = Literal["cls", "last", "mean"]
Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify")


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the rows of a text become its answer.

    tasks: what can be asked for, the usual one first. method: which row stands for a text: the first, the last, or the
    mean of all. is_normalised: embeddings get length one. activation: what turns a classifier's logits into numbers.
    dimensions: lengths that an embedding may be cut to (matryoshka); (): any; None: it was not trained for that.
    """

    tasks: tuple[Task, ...]
    method: Method
    is_normalised: bool = True
    activation: Literal["softmax", "sigmoid", "identity"] = "softmax"
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] | None = None


def read_labels(config: Mapping[str, Any], fields: ConfigFields) -> tuple[str, ...]:
    """Return a classifier's labels in their order; LABEL_0 .. where the config names none.

    Raises:
        ModelFileError: num_labels or id2label makes no sense, or they disagree.
    """
    named = fields.raw("id2label")
    n = fields.size("num_labels", len(named) if isinstance(named, dict) and named else 2)
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(n))
    by_id = {str(i): label for i, label in named.items()} if isinstance(named, dict) else {}
    labels = tuple(by_id.get(str(i)) for i in range(n))
    if len(by_id) != n or not all(isinstance(label, str) for label in labels):
        raise fields.broken("id2label", config.get("id2label"), f"a name for each of {n} labels")
    return tuple(str(label) for label in labels)


def read_activation(fields: ConfigFields, n_labels: int) -> Literal["softmax", "sigmoid", "identity"]:
    """Return what turns logits into a classifier's answer, as `problem_type` or sentence-transformers' field says.

    Raises:
        UnsupportedModel: it is another function.
    """
    kind = fields.raw("problem_type")
    usual: Literal["softmax", "sigmoid"] = "softmax" if n_labels > 1 else "sigmoid"
    if kind == "regression":
        return "identity"
    if kind == "multi_label_classification":
        return "sigmoid"
    if kind == "single_label_classification":
        return usual
    if kind is not None:
        raise fields.refused("problem_type", kind, "regression, single_ and multi_label_classification are known")
    named = fields.raw("sbert_ce_default_activation_function")
    own = fields.raw("sentence_transformers")
    if named is None and isinstance(own, dict):
        named = own.get("activation_fn")
    if named is None or (isinstance(named, str) and named.rpartition(".")[2] in ("Sigmoid", "Softmax")):
        return usual
    if isinstance(named, str) and named.rpartition(".")[2] == "Identity":
        return "identity"
    raise fields.refused("sbert_ce_default_activation_function", named, "Sigmoid, Softmax and Identity are known")


def read_dimensions(fields: ConfigFields) -> tuple[int, ...] | None:
    """Return the lengths that an embedding may be cut to; (): any; None: none.

    Raises:
        ModelFileError: they are no lengths.
    """
    is_any = fields.flag("is_matryoshka", default=False)
    listed = fields.raw("matryoshka_dimensions")
    if listed is None:
        return () if is_any else None
    if not isinstance(listed, list) or not listed or not all(type(n) is int and n > 0 for n in listed):
        raise fields.broken("matryoshka_dimensions", listed, "a list of lengths")
    return tuple(sorted(listed))
