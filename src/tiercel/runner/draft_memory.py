"""What drafting takes of memory beside the pages, by sizes that are known before anything is allocated.

All of it is counted as if a step had as many drafts as it may: an upper bound, as pages that no step touches cost
nothing. Left out are activations of draft rows and of draft passes, which are small beside rows of logits.
"""

from collections.abc import Iterable, Sequence
from math import prod

from tiercel.ops.program import StateLayer

_FLOAT_BYTES = 4


def n_trial_rows(n_draft_rows: int, n_slots: int, max_step_tokens: int) -> int:
    """Return how many rows of a step may be taken back: drafts, and beside them the token that each stands behind."""
    return min(n_draft_rows + min(n_draft_rows, n_slots), max_step_tokens)


def trial_row_bytes(layers: Sequence[StateLayer]) -> int:
    """Return the bytes of a row that may be taken back: the inputs of all recurrent ops, and outputs of the widest.

    An upper bound: a layer's decay may be one number a head, and is counted as one a column of its keys. Rows begin at
    sixteens (`native/src/trial.cpp`).
    """
    inputs = sum(_by_sixteens(width) for layer in layers for width in _input_widths(layer))
    outputs = max((2 * layer.conv_channels + layer.heads * layer.value_dim for layer in layers), default=0)
    return _FLOAT_BYTES * (inputs + _by_sixteens(outputs))


def _input_widths(layer: StateLayer) -> tuple[int, ...]:
    if layer.kind == "ssd":  # whose convolution is an op of its own
        return layer.conv_channels, layer.conv_channels, layer.heads
    return layer.conv_channels, layer.heads * layer.key_dim, layer.heads


def _by_sixteens(n: int) -> int:
    return -(-n // 16) * 16


def drafting_bytes(
    *,
    n_draft_rows: int,
    n_slots: int,
    max_step_tokens: int,
    vocab_size: int,
    state_layers: Sequence[StateLayer] = (),
    n_pass_rows: int = 0,
    n_pass_vocab: int = 0,
    weight_bytes: int = 0,
    head_shapes: Iterable[tuple[int, ...]] = (),
) -> int:
    """Return the most bytes that drafting takes beside the pages.

    `n_draft_rows` of a step of at most `max_step_tokens` are drafts, each with a row of logits over `vocab_size`, and
    with recurrent `state_layers` a row that may be taken back. A drafter that is a model and runs in the steps has
    beside `weight_bytes` the float32 tables of its head, and `n_pass_rows` rows of logits over `n_pass_vocab`. Of these
    weights and tables are always there.
    """
    rows = n_draft_rows * vocab_size + n_pass_rows * n_pass_vocab
    tables = sum(prod(shape) for shape in head_shapes)
    trial = n_trial_rows(n_draft_rows, n_slots, max_step_tokens) * trial_row_bytes(state_layers) if state_layers else 0
    return _FLOAT_BYTES * (rows + tables) + trial + weight_bytes
