"""What the engine tells a runner about one step, and what it gets back. Knows neither models nor requests.

A sequence lives in a **slot**: a row of the token table and of the page table, kept for its whole life. The runner owns
the arrays; the engine says what happens to a slot through `runner.interface.Runner`.
"""

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from array import array

    import numpy as np

# Any of these: what has the buffer protocol, an element type and `tolist`. numpy is not imported to make a step.
Ints: TypeAlias = "np.ndarray | array[int] | memoryview"
Floats: TypeAlias = "np.ndarray | memoryview[float]"
Bools: TypeAlias = "np.ndarray | memoryview[bool]"

OWN_DRAFTS = -2  # of `Drafts.seq_from`


class Drafts(msgspec.Struct, frozen=True):
    """What is foretold of a step's sequences, and computed beside what is known.

    A sequence with drafts begins at its slot's last token, wherever that is when the step runs: the steps before it may
    have drafts as well, so the plan's `seq_start` says where it is at most. Its tokens from position `seq_from` on are
    foretold. If those that are there by then are as foretold, the ones after them are computed too, `seq_tokens` rows
    in all at most. Every row is sampled as if the drafts before it were the sequence's tokens; the rows that count are
    those up to the first whose token is not the one foretold.

    With OWN_DRAFTS nothing is foretold here: what the last step of the slot drafted is (`StepPlan.n_draft`), if it
    begins where the slot's tokens end by then. How much of it is computed, `seq_tokens` rows in all at most, the step
    decides for all its sequences together (`Runner.set_draft_policy`).

    Shapes:
        seq_from    int32 [S]; -1: the sequence is computed as without drafts; OWN_DRAFTS: its own, seq_count is 0
        seq_count   int32 [S]; how many of its tokens are foretold
        token_ids   int32 [sum of seq_count], sequence by sequence
        saves       two int32 [S]: a place for a copy of the sequence's recurrent state as it stands at a position;
                    -1: none. Nothing is copied where the rows that count do not take it there. None: nobody has one
    """

    seq_from: Ints
    seq_count: Ints
    token_ids: Ints
    saves: "tuple[Ints, Ints] | None" = None


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass: which tokens of which slots are computed, and which rows need logits.

    Sequence s computes the tokens at positions `seq_start[s] .. seq_start[s] + seq_tokens[s]` of slot `seq_slot[s]`.
    Their ids are in the slot's row of the token table: written by `Runner.admit`, or by an earlier step's sampler
    (which may still be in flight).

    Shapes:
        seq_slot, seq_start, seq_tokens   int32 [S]; slots are distinct, seq_tokens >= 1
        seq_samples                       bool [S]; True: the last row is sampled, its token written to the table
        seq_scores                        bool [S]; True: every row but a sampled last one gives the log-probability
                                          of the token after it
        On a pooling model nothing is sampled: seq_samples asks for the last row, seq_scores for every row.
        seq_masked                        bool [S]; True: the sampled token is one of those that a mask allows, which
                                          `Runner.set_masks` brings before the step can end; None: no sequence has one.
                                          A sequence with drafts has `seq_tokens` masks, one a row
        drafts                            None: no sequence has any
        n_draft                           drafts to make, when the step has sampled, of each sequence that it sampled;
                                          `RunnerLimits.n_draft_max` at most. They are left in the slot, and told. It
                                          writes to the slot's pages, from the new last token's place on to
                                          `RunnerLimits.draft_reach_tokens` places behind it, as far as those set
                                          before `submit` reach
    """

    step_id: int
    seq_slot: Ints
    seq_start: Ints
    seq_tokens: Ints
    seq_samples: Bools
    seq_scores: Bools
    n_logprobs: int | None  # None: no log-probabilities; N: those of the chosen token and of the N likeliest
    seq_masked: "Bools | None" = None
    drafts: Drafts | None = None
    n_draft: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.seq_tokens.tolist())


class StepResult(msgspec.Struct, frozen=True):
    """The rows that needed logits, in plan order (sequence by sequence, position by position).

    Shapes:
        row_seq        int32 [R]   index into the plan's sequences
        row_pos        int32 [R]   position whose logits these are
        row_token      int32 [R]   sampled token, or for a scored row the token that follows; -1: the logits held a NaN;
                               -2: the constraints leave no token
        row_logprob    f32   [R]   log-probability of row_token, or None if the plan asked for none
        row_rank       int32 [R]   1 + number of tokens with a strictly greater logit; None likewise
        top_ids        int32 [R, N], top_logprobs f32 [R, N]   the likeliest, best first; None likewise
        rows           f32   [R, W]  of a pooling model (`RunnerLimits.row_width`): what it gives instead of a token;
                               row_token is 0 then
        seq_drafted    int32 [S]  drafts that each sequence computed, of which all but the last row's are in row_token;
                               None: the plan had none
        seq_drafts     int32 [S, n_draft]  what was drafted of each sequence, from its new end on; -1 where nothing is:
                               it was not sampled, its pages or its slot end there, or a number was none
        seq_confidence f32   [S, n_draft]  how likely each of them comes if those before it do, as the drafter has it; 0
                               where nothing is; both None: the plan asked for none
        draft_ns       time that drafting took, which compute_ns does not hold
        n_drafts_broken  sequences of which a confidence was no number; that draft and those behind it are left out
    """

    step_id: int
    row_seq: Ints
    row_pos: Ints
    row_token: Ints
    row_logprob: "np.ndarray | None" = None
    row_rank: "np.ndarray | None" = None
    top_ids: "np.ndarray | None" = None
    top_logprobs: "np.ndarray | None" = None
    compute_ns: int = 0
    rows: "np.ndarray | None" = None
    seq_drafted: "Ints | None" = None
    seq_drafts: "Ints | None" = None
    seq_confidence: "Floats | None" = None
    draft_ns: int = 0
    n_drafts_broken: int = 0


class RunnerLimits(msgspec.Struct, frozen=True):
    """What one runner can hold; all of it comes from the capacity formula in `runner.capacity`."""

    n_slots: int
    max_len_tokens: int  # of one sequence, prompt and output
    max_step_tokens: int
    max_logits_rows: int  # of one step; at least n_slots
    page_size_tokens: int
    n_pages: int
    vocab_size: int
    row_width: int = 0  # of a pooling model's rows; 0: the model generates
    n_segments: int = 1  # kinds of text that the model tells apart
    needs_whole: bool = False  # a sequence must be computed in one step, as its tokens see later ones
    state_bytes: int = 0  # of a sequence's recurrent state, which belongs to its slot; 0: the model has none
    n_snapshots: int = 0  # places for states that outlive their slot
    snapshot_spacing_tokens: int = 0  # how far apart states of one sequence are kept at most; a multiple of the page
    has_kv: bool = True  # False: pages are only counted, as the state is all that a sequence leaves
    takes_drafts: bool = True  # a step may compute tokens that turn out wrong
    n_draft_max: int = 0  # drafts that a step makes of each sequence itself; 0: it has nothing to make them with
    draft_reach_tokens: int = 0  # places behind a sequence's last token that this writes to, if it has pages there
    n_unsettled_tokens: int = 0  # known tokens behind a page's end without which a later step may write to it again

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pages hold; where there are none, as nothing is kept by the token: as many as a slot has."""
        return self.n_pages * self.page_size_tokens if self.n_pages else self.max_len_tokens
