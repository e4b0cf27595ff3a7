"""A draft head that is one more layer of its decoder (multi-token prediction): what it is made of, and its ops.

x = joined [norm(embedding of the next token) | norm(what the model gave out)]; the layer; a norm, whose result is the
head's logits' input and what its next step is given. Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2.
"""

from typing import NamedTuple

from tiercel.models.decoder import Decoder
from tiercel.models.model import RecordOptions
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

Shapes = dict[str, tuple[int, ...]]


class DraftNames(NamedTuple):
    """The weights that a draft head has beside its layer's: three norms, and the matrix that makes one row of two."""

    join: str
    token_norm: str
    hidden_norm: str
    norm: str


def draft_weights(model: Decoder, names: DraftNames) -> Shapes:
    """Return the shapes of a draft head's own weights; its layer is the one past the model's last."""
    hidden, i = model.config.hidden_size, model.config.n_layers
    shapes: Shapes = {names.join: (hidden, 2 * hidden)}
    shapes |= {name: (hidden,) for name in names[1:]}
    return shapes | {f"{model.layer_prefix(i)}.{name}": shape for name, shape in model.weights_of_layer(i).items()}


def record_draft(
    model: Decoder, rec: Recorder, options: RecordOptions, names: DraftNames, *, skips_first: bool
) -> Value:
    """Write one step of a draft head that shares the model's embedding and head; see `Model.record_mtp`."""
    token = rec.embed(
        f"{model.prefix}.{model.embed_name}.weight", scale=model.embed_scale(rec), skips_first=skips_first
    )
    token = model.norm(rec, options, token, names.token_norm)
    given = model.norm(rec, options, rec.given(model.config.hidden_size), names.hidden_norm)
    x = rec.linear(rec.join(token, given), names.join)
    x = model.layer(rec, options, model.config.n_layers, x, model.rope_tables(rec, options, list(model.config.ropes)))
    return model.head(rec, rec.keep_hidden(model.norm(rec, options, x, names.norm)))
