"""A draft head of modules that are one more layer of their decoder each (multi-token prediction), and their ops.

Module s: x = joined [norm(embedding of the token s + 1 places on) | norm(what module s - 1, or the model, gave out)];
the layer; a norm, whose result is the head's logits' input and what the next module, or its own next step, is given.
Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2.
"""

from typing import NamedTuple

from tiercel.models.decoder import Decoder
from tiercel.models.fields import ConfigFields
from tiercel.models.model import RecordOptions
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

Shapes = dict[str, tuple[int, ...]]
_MAX_MODULES = 16


class DraftNames(NamedTuple):
    """The weights that a module has beside its layer's: three norms, and the matrix that makes one row of two."""

    join: str
    token_norm: str
    hidden_norm: str
    norm: str


def read_n_modules(fields: ConfigFields, name: str, default: int) -> int:
    """Read how many modules the draft head has, if the checkpoint has it.

    Raises:
        ModelFileError: it is no such number.
    """
    found = fields.raw(name)
    n = default if found is None else found
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _MAX_MODULES:
        raise fields.broken(name, n, f"a number of layers, at most {_MAX_MODULES},")
    return n


def names_of(model: Decoder, module: int, *names: str) -> DraftNames:
    """Return the names of a module's own weights where each has all of them, in its layer."""
    return DraftNames(*(f"{model.layer_prefix(model.config.n_layers + module)}.{name}.weight" for name in names))


def draft_weights(model: Decoder, names: DraftNames, module: int) -> Shapes:
    """Return the shapes of a module's own weights; the first's layer is the one past the model's last."""
    hidden, i = model.config.hidden_size, model.config.n_layers + module
    shapes: Shapes = {names.join: (hidden, 2 * hidden)}
    shapes |= {name: (hidden,) for name in names[1:]}
    return shapes | {f"{model.layer_prefix(i)}.{name}": shape for name, shape in model.weights_of_layer(i).items()}


def record_draft(
    model: Decoder, rec: Recorder, options: RecordOptions, names: DraftNames, module: int, *, skips_first: bool
) -> Value:
    """Write one step of a module that shares the model's embedding and head; see `Model.record_mtp`."""
    token = rec.embed(
        f"{model.prefix}.{model.embed_name}.weight", scale=model.embed_scale(rec), skips_first=skips_first
    )
    token = model.norm(rec, options, token, names.token_norm)
    given = model.norm(rec, options, rec.given(model.config.hidden_size), names.hidden_norm)
    x = rec.linear(rec.join(token, given), names.join)
    tables = model.rope_tables(rec, options, list(model.config.ropes))
    x = model.layer(rec, options, model.config.n_layers + module, x, tables)
    return model.head(rec, rec.keep_hidden(model.norm(rec, options, x, names.norm)))
