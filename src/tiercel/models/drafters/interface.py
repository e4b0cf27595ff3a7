"""What a drafter that is a model is to the rest of Tiercel: facts, weights, and the two places where it computes.

In the target's program `record_context` writes what the drafter makes of each of the step's tokens; in a program of its
own `record_draft` writes one draft pass. A `block` drafter computes all drafts of a sequence in one pass, over the rows
[last token, mask, mask ..]; its context is keys and values, kept behind the target's. A `chain` drafter computes one
draft a pass: its first pass has the target's rows, each with the token after it, and what the target's program gave out
of them; so have those of further modules, with a token further on each, and what the pass before gave out. Each later
pass has a row a sequence, and what the pass before gave out. Read next: `block`, `eagle3`, `mtp`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msgspec.structs import replace

from tiercel.base.errors import ConfigError
from tiercel.models.info import ModelInfo
from tiercel.models.model import RecordOptions, TapStream, Tensor
from tiercel.ops.program import KvLayer, Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """How drafts are picked from a draft pass's logits, one after the other.

    `plain`: each row's best (or drawn) token. `markov`: a bias by the token before is added to the logits first.
    `selector`: among each row's `topk` best, by an edge from the token before.

    `weights` are canonical names by role. markov: `w1` [V, r], `w2` [V_draft, r]; for `gated` `gate` [r, E + r] of
    [hidden, w1's row] and `gate_bias` [r]; for `rnn` `joint` [3r, r + r + E] of [state, w1's row, hidden], whose rows
    make the gate, the candidate and the output, and `joint_bias` [3r]; perhaps `confidence` [1, n] of [hidden, w1's
    row] and `confidence_bias` [1] (n: the hidden size, plus r with `confidence_reads_markov`). selector: `predecessor`
    [V, r], `successor` [V_draft, r], `projection` [r, E]. `d2t` [V_draft] is there if the draft vocabulary is smaller
    than the target's: target id minus draft id. Biases may be absent.
    """

    kind: Literal["plain", "markov", "selector"]
    n_vocab: int
    """Columns of the draft pass's logits."""
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int = 0
    topk: int = 0
    """markov: a bias is added to so many of each row's best only, and the others are out; 0: to all."""
    weights: Mapping[str, str] = field(default_factory=dict)
    confidence_reads_markov: bool = False
    d2t: str | None = None


class DraftModel(ABC):
    """One drafter with its config read, and checked against its target.

    Names of its own tensors begin with `draft.`; the embedding and the head are the target's, by their own names, where
    the checkpoint has none.
    """

    kind: ClassVar[Literal["block", "chain"]]
    reads_hidden: ClassVar[bool] = False
    """Whether its given rows are what the target gives a draft head of its own (`Model.record(keeps_hidden=)`)."""
    n_modules: int = 1
    """Modules that a chain's first drafts are made with, one each; the last makes those after them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in programs and messages: `dspark`, `mtp` .."""

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target layers, from 0, after which it reads a stream; -1 is the embeddings. Ascending; () for none."""

    @property
    def tap_stream(self) -> TapStream:
        """Which stream that is, of a target that has several."""
        return "residual"

    @property
    @abstractmethod
    def n_draft_max(self) -> int:
        """Drafts of one sequence at most: a block's length is fixed, a chain's is bounded for no loop to go on."""

    @property
    def n_block_rows(self) -> int:
        """Rows of a block, always all of them; 1 for a chain."""
        return 1

    @property
    def first_logits_row(self) -> int:
        """The block's row that foretells the first draft: 0, or 1 if masks stand for themselves."""
        return 0

    @property
    def mask_token_id(self) -> int:
        """The token of a block's rows past the first; -1: the vector that `record_draft`'s program names."""
        return -1

    @abstractmethod
    def draft_weights(self) -> Shapes:
        """Return the shape of every tensor of its own, whether ops read it or the head, by canonical name."""

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor of its checkpoint may be left unread, because the target has it too."""
        del name
        return False

    def shared_weights(self) -> tuple[str, ...]:
        """Return the names of the target's tensors that its draft program reads."""
        return ()

    def context_weights(self) -> Shapes:
        """Return those of `draft_weights` that `record_context` reads."""
        return {}

    @abstractmethod
    def kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return its layers of keys and values, numbered from `first` on, behind the target's last."""

    def extended(self, info: ModelInfo) -> ModelInfo:
        """Return its target's facts with its own layers behind the target's: what a token leaves in the pages."""
        return replace(info, kv_layers=(*info.kv_layers, *self.kv_layers(info.next_layer)))

    def context_kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return those of them that `record_context` fills in the target's program: a block's, all; a chain's, none."""
        return self.kv_layers(first) if self.kind == "block" else ()

    @abstractmethod
    def record_context(self, rec: Recorder, options: RecordOptions, taps: Sequence[Value], first: int) -> Value | None:
        """Write what it makes of each token, in the target's program; `first` as for `kv_layers`.

        Returns: what the program gives out of each token for the first draft pass; None if nothing, or what `Model`
        gives its own draft head.
        """

    @abstractmethod
    def record_draft(
        self,
        tensors: Mapping[str, Tensor],
        *,
        first: int,
        module: int = 0,
        compute_dtype: ComputeDtype = ComputeDtype.AUTO,
        max_len_tokens: int | None = None,
        norm_weights_include_one: bool = False,
    ) -> Program:
        """Record one draft pass of a module; its `hidden` is what the head, or the next pass, reads of each row.

        Raises:
            ModelFileError: a weight is missing.
            ShapeError: sizes do not fit an op's contract.
        """

    def recorder(self, tensors: Mapping[str, Tensor], compute_dtype: ComputeDtype) -> Recorder:
        """Return what a draft pass over its own and its target's tensors is written with."""
        named = {name: tensors[name] for name in (*self.draft_weights(), *self.shared_weights()) if name in tensors}
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        formats = {name: tensor.format for name, tensor in named.items()}
        return Recorder(f"{self.name} drafter", shapes, formats, ComputeDtype(compute_dtype), keeps_hidden=True)

    @abstractmethod
    def head(self) -> HeadSpec:
        """Return how drafts are picked from the pass's logits."""

    def check_n_draft(self, n: int) -> None:
        """Check a number of drafts to make at a time.

        Raises:
            ConfigError: it makes more, or none.
        """
        if not 1 <= n <= self.n_draft_max:
            why = f"a block of {self.n_block_rows} rows" if self.kind == "block" else "a chain"
            raise ConfigError(
                f"num_speculative_tokens: got {n}; {self.name} drafts 1 to {self.n_draft_max} tokens at a time "
                f"({why}); choose one of these"
            )
