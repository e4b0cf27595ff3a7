"""The native runner: lowers a program onto the C++ core and replays it. Meets `runner.interface.Runner`.

Lowering walks the ops once and hands each to the core with its buffers' places and its packed weights; after that a
step is one call that holds no Python. `explain` says which kernel and format each op got.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tiercel import _native
from tiercel.base import env, machine
from tiercel.base.errors import ConfigError, ShapeError, UnsupportedModel
from tiercel.ops import lowered as ops
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.place import Placement, place
from tiercel.ops.program import KvLayer, Weight
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import Drafts, Ints, RunnerLimits, StepPlan, StepResult
from tiercel.runner.capacity import Capacity
from tiercel.runner.draft_memory import n_trial_rows
from tiercel.runner.drafting import Drafting, check_policy, pool_layers
from tiercel.runner.weights import PackedWeightStore
from tiercel.sampling.native import native_params

if TYPE_CHECKING:
    import numpy as np

    from tiercel.kv.tiers.buffers import BufferPool
    from tiercel.kv.tiers.identity import ObjectGroup
    from tiercel.kv.tiers.interface import Bytes

_HEAD_COLUMNS = 8
_PAGE_BUFFERS_BYTES = 32 << 20  # kept to copy pages into: fresh memory costs five times the copy


class NativeSettings(msgspec.Struct, frozen=True):
    """What a native runner needs to know beside its program."""

    max_step_tokens: int
    max_logits_rows: int
    kv_dtype: str  # "float16" | "float32" | "int8"
    n_threads: int
    level: str | None = None  # None: `chosen_level`
    max_draft_rows: int = 0  # of one step of a model with recurrent state; 0: it takes no drafts
    verification: str = "matching"  # | "standard" | "block": how sampled drafts are accepted


def chosen_level() -> str:
    """Return the kernels' level: the strongest this processor runs, or the one TIERCEL_ISA names.

    Raises: ConfigError: the named level does not run here.
    """
    levels = _native.kernel_levels()
    forced = env.read(env.ISA)
    if forced is None:
        return levels[-1]
    if forced not in levels:
        raise ConfigError(
            f"environment {env.ISA.name}: got {forced!r}; this processor runs {', '.join(levels)}; unset it"
        )
    return forced


class NativeRunner:
    """Slots, pages and the recorded program on the C++ core. Owned by the engine core; one calling thread."""

    def __init__(
        self,
        program: ops.Lowered,
        weights: PackedWeightStore,
        capacity: Capacity,
        settings: NativeSettings,
        placement: Placement | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Pack what is not packed and hand the program to the core. `placement` must be of this program; one that is of
        other bounds is not used. `weights` are those of the program and of what drafts.
        """
        self._pool = pool_layers(program, drafting)
        _check_heads(self._pool, settings.kv_dtype)
        self.program = program
        self.capacity = capacity
        self.level = settings.level or chosen_level()
        self._settings = settings
        bounds = Bounds(settings.max_step_tokens, capacity.max_num_seqs, settings.max_logits_rows)
        if placement is None or placement.bounds != bounds:
            placement = place(program, bounds, _native.quant_row_bytes)
        self.placement = placement
        recording = _native.Program(self.level, settings.n_threads)
        weights.pack_all(matrices_of(program))
        _Lowering(recording, self.placement, weights).run(program, self._pool)
        layers = [(layer.n_kv_heads, layer.head_dim) for layer in self._pool]
        latent_layers = [i for i, layer in enumerate(self._pool) if layer.latent_values]
        self.kv: _native.KvMemory | None = _native.make_kv(
            max(capacity.n_pages, 1), capacity.page_size_tokens, settings.kv_dtype, layers, latent_layers
        )
        logits = self.placement.places[program.output.id]
        cpus = machine.allowed_cpus()
        vocab_size = _n_token_ids(program)
        self._runner = _native.StepRunner(
            program=recording,
            kv=self.kv,
            arena_bytes=self.placement.arena_bytes,
            logits=(logits.offset_bytes, logits.stride_bytes),
            vocab=program.output.width,
            n_slots=capacity.max_num_seqs,
            max_len=capacity.max_len_tokens,
            max_tokens=settings.max_step_tokens,
            max_rows=settings.max_logits_rows,
            # Pinned only when the team fills what it may use: else two teams would fight for the first processors.
            cpus=cpus if settings.n_threads == len(cpus) else [],
            state_slot_bytes=sum(layer.nbytes for layer in program.state_layers),
            n_token_ids=vocab_size,
            is_pooling=program.is_pooling,
            n_snapshots=capacity.n_snapshots if program.state_layers else 0,
            max_trial_rows=n_trial_rows(
                settings.max_draft_rows if program.state_layers else 0, capacity.max_num_seqs, settings.max_step_tokens
            ),
            drafting=None if drafting is None else self._drafter(drafting, weights),
            verification=settings.verification,
        )
        self._page_buffers: BufferPool | None = None  # once a page was copied
        self._n_bad_told = 0
        # Where each slot's state stands; None for models without any. A place where nothing was saved stands at 0.
        self._next_start = [0] * capacity.max_num_seqs if program.state_layers else None
        self._saved_at = [0] * capacity.n_snapshots if program.state_layers else []
        # Steps with drafts that were not collected: until then states stand there at most.
        self._drafting: dict[int, StepPlan] = {}
        self._limits = RunnerLimits(
            n_slots=capacity.max_num_seqs,
            max_len_tokens=capacity.max_len_tokens,
            max_step_tokens=settings.max_step_tokens,
            max_logits_rows=settings.max_logits_rows,
            page_size_tokens=capacity.page_size_tokens,
            n_pages=capacity.n_pages,
            vocab_size=vocab_size,
            row_width=program.output.width if program.is_pooling else 0,
            n_segments=min((op.w.shape[0] for op in _segments(program)), default=1),
            needs_whole=any(isinstance(op, ops.SequenceAttention) for op in program.ops),
            state_bytes=sum(layer.nbytes for layer in program.state_layers),
            n_snapshots=len(self._saved_at),
            snapshot_spacing_tokens=capacity.snapshot_spacing_tokens,
            has_kv=bool(self._pool) or not program.state_layers,
            takes_drafts=not program.is_pooling and (not program.state_layers or settings.max_draft_rows > 0),
            n_draft_max=0 if drafting is None else drafting.n_draft_max,
            draft_reach_tokens=0 if drafting is None else drafting.reach_tokens,
            n_unsettled_tokens=0 if drafting is None else drafting.n_unsettled_tokens,
        )

    def _drafter(self, drafting: Drafting, weights: PackedWeightStore) -> "_native.Drafting":
        """Hand what drafts to the core."""
        drafting.check(self.program)
        hidden = self.program.hidden
        bounds = drafting.bounds(self.capacity.max_num_seqs, self._settings.max_step_tokens)
        modules = []
        for program in drafting.programs:
            placement = place(program, bounds, _native.quant_row_bytes)
            recording = _native.Program(self.level, self._settings.n_threads)
            weights.pack_all(matrices_of(program))
            _Lowering(recording, placement, weights).run(program, self._pool)
            own = None if program.hidden is None else _place_of(placement, program.hidden)
            modules.append((recording, placement.arena_bytes, _place_of(placement, program.output), own))
        return _native.Drafting(
            modules,
            drafting.head,
            drafting.kind,
            drafting.n_draft_max,
            (drafting.n_block_rows, drafting.first_logits_row, drafting.mask_token_id),
            (bounds.n_tokens, bounds.n_rows),
            None if hidden is None or drafting.kind != "chain" else _place_of(self.placement, hidden),
            drafting.draws,
        )

    @property
    def limits(self) -> RunnerLimits:
        """What the runner can hold."""
        return self._limits

    @property
    def kv_dtype(self) -> str:
        """Type of stored keys and values."""
        return self._settings.kv_dtype

    @property
    def n_threads(self) -> int:
        """Threads that compute."""
        return self._settings.n_threads

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        n_prompt_tokens: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        n_first: int | None = None,
    ) -> None:
        """See `Runner.admit`."""
        if self._next_start is not None:
            self._next_start[slot] = 0
        self._runner.admit(slot, array("i", token_ids), n_prompt_tokens, native_params(params, seed, stop_ids), n_first)

    def set_pages(self, slot: int, first_idx: int, page_ids: Sequence[int]) -> None:
        """See `Runner.set_pages`."""
        self._runner.set_pages(slot, first_idx, array("i", page_ids))

    def save_state(self, slot: int, snapshot_idx: int) -> None:
        """See `Runner.save_state`."""
        self._check_place(snapshot_idx)
        assert self._next_start is not None, "runner.native: places without a state"
        self._runner.save_state(slot, snapshot_idx)
        self._saved_at[snapshot_idx] = self._next_start[slot]

    def load_state(self, slot: int, snapshot_idx: int) -> None:
        """See `Runner.load_state`."""
        self._check_place(snapshot_idx)
        if self._saved_at[snapshot_idx] == 0:
            raise ShapeError(f"runner.load_state: nothing was saved in place {snapshot_idx}; save a state there first")
        assert self._next_start is not None, "runner.native: places without a state"
        self._runner.load_state(slot, snapshot_idx)
        self._next_start[slot] = self._saved_at[snapshot_idx]

    def _check_place(self, snapshot_idx: int) -> None:
        if not 0 <= snapshot_idx < len(self._saved_at):
            raise ShapeError(
                f"runner: place {snapshot_idx} for a state; there are {len(self._saved_at)}; choose one of them"
            )

    def release(self, slot: int) -> None:
        """See `Runner.release`. A native slot holds nothing that needs giving back."""

    def submit(self, plan: StepPlan, given: "np.ndarray | None" = None) -> None:
        """See `Runner.submit`. `given`, float32 [tokens, W], are the rows that a draft head's program takes."""
        if self._next_start is not None:
            self._check_starts(plan, self._next_start)
        drafts = plan.drafts
        try:
            self._runner.submit(
                plan.step_id,
                plan.seq_slot,
                plan.seq_start,
                plan.seq_tokens,
                plan.seq_samples,
                plan.seq_scores,
                -1 if plan.n_logprobs is None else plan.n_logprobs,
                plan.seq_masked,
                given,
                None if drafts is None else (drafts.seq_from, drafts.seq_count, drafts.token_ids),
                None if drafts is None else drafts.saves,
                plan.n_draft,
            )
        except ValueError as error:
            raise ShapeError(f"runner.submit: step {plan.step_id}: {error}") from error
        if self._next_start is not None:
            for slot, start, n in zip(plan.seq_slot, plan.seq_start, plan.seq_tokens, strict=True):
                self._next_start[slot] = int(start) + int(n)
            if drafts is not None:
                self._drafting[plan.step_id] = plan
                self._note_saves(drafts)

    def _check_starts(self, plan: StepPlan, next_start: list[int]) -> None:
        """Refuse a step that begins neither where the one before ended nor at 0: a state has no positions."""
        if plan.drafts is not None and not self._limits.takes_drafts:
            raise ShapeError(f"runner.submit: step {plan.step_id}: drafts, and no room was made for any; send none")
        for slot, start in zip(plan.seq_slot, plan.seq_start, strict=True):
            if start != 0 and 0 <= slot < len(next_start) and start != next_start[slot]:
                raise ShapeError(
                    f"runner.submit: step {plan.step_id}: slot {slot} starts at {start}; its recurrent state stands at "
                    f"{next_start[slot]}; start there, or at 0"
                )

    def set_draft_policy(self, step_seconds: Sequence[float], chances: Sequence[float]) -> None:
        """See `Runner.set_draft_policy`."""
        if not self._limits.n_draft_max:
            raise ShapeError("runner.set_draft_policy: this runner makes no drafts; give it a drafter")
        check_policy(step_seconds, chances)
        self._runner.set_draft_policy(step_seconds, chances)

    @property
    def n_bad_drafts(self) -> int:
        """How often what is drafted of a sequence ended early, as a token or a confidence was none."""
        return self._runner.n_bad_drafts()

    def _note_saves(self, drafts: Drafts) -> None:
        if drafts.saves is None:
            return
        for place_idx, n_tokens in zip(*(column.tolist() for column in drafts.saves), strict=True):
            if place_idx >= 0:
                self._saved_at[place_idx] = n_tokens

    def _settle(self, plan: StepPlan, row_seq: Ints) -> None:
        """Take back what a step with drafts did not compute, or computed in vain."""
        assert plan.drafts is not None, "runner.native: a step without drafts has nothing to settle"
        assert self._next_start is not None, "runner.native: no state to settle"
        n_kept = Counter(row_seq.tolist())
        for s, first in enumerate(plan.drafts.seq_from.tolist()):
            if first != -1:
                self._next_start[plan.seq_slot[s]] -= int(plan.seq_tokens[s]) - n_kept[s]

    def set_masks(self, step_id: int, masks: "np.ndarray") -> None:
        """See `Runner.set_masks`."""
        try:
            self._runner.set_masks(step_id, masks)
        except ValueError as error:
            raise ShapeError(f"runner.set_masks: step {step_id}: {error}") from error

    def wait(self, n_steps: int) -> int:
        """See `Runner.wait`."""
        return self._runner.wait(n_steps)

    def hurry(self) -> None:
        """See `Runner.hurry`."""
        self._runner.hurry()

    def collect(self) -> StepResult:
        """See `Runner.collect`."""
        told = self._runner.collect()
        n_bad = self.n_bad_drafts - self._n_bad_told if self._limits.n_draft_max else 0
        self._n_bad_told += n_bad
        result = StepResult(*told, n_drafts_broken=n_bad)
        if result.seq_drafted is not None and self._next_start is not None:
            self._settle(self._drafting.pop(result.step_id), result.row_seq)
        return result

    @property
    def page_group(self) -> "ObjectGroup | None":
        """See `Runner.page_group`."""
        from tiercel.runner.pages import page_group  # who keeps pages elsewhere pays for it

        assert self.kv is not None, "runner.native: closed"
        size = self.capacity.page_size_tokens
        return page_group(self._pool, self.kv_dtype, size, self.kv.page_bytes)

    def read_pages(self, page_ids: Sequence[int]) -> "list[Bytes]":
        """See `Runner.read_pages`."""
        assert self.kv is not None, "runner.native: closed"
        if self._page_buffers is None:
            from tiercel.kv.tiers.buffers import BufferPool

            self._page_buffers = BufferPool(_PAGE_BUFFERS_BYTES)
        n_bytes = self.kv.page_bytes
        pages: list[Bytes] = []
        for page_id in page_ids:
            page = self._page_buffers.take(n_bytes)[:n_bytes]
            self.kv.read(page_id, page)
            pages.append(page)
        return pages

    def write_pages(self, page_ids: Sequence[int], data: "Sequence[Bytes]") -> None:
        """See `Runner.write_pages`."""
        assert self.kv is not None, "runner.native: closed"
        from tiercel.runner.pages import check_pages

        check_pages(page_ids, data, self.kv.page_bytes)
        for page_id, one in zip(page_ids, data, strict=True):
            self.kv.write(page_id, memoryview(one).cast("B"))

    @property
    def state_group(self) -> "ObjectGroup | None":
        """See `Runner.state_group`."""
        from tiercel.runner.pages import state_group

        return state_group(self.program.state_layers)

    def read_states(self, snapshot_idxs: Sequence[int]) -> "list[Bytes]":
        """See `Runner.read_states`."""
        return [self._runner.read_snapshot(i) for i in snapshot_idxs]

    def write_states(self, snapshot_idxs: Sequence[int], n_tokens: Sequence[int], data: "Sequence[Bytes]") -> None:
        """See `Runner.write_states`."""
        from tiercel.runner.pages import check_pages

        check_pages(snapshot_idxs, data, self._limits.state_bytes, of="states")
        for i in snapshot_idxs:
            self._check_place(i)
        for i, n, one in zip(snapshot_idxs, n_tokens, data, strict=True):
            self._runner.write_snapshot(i, memoryview(one).cast("B"))
            self._saved_at[i] = n

    def last_logits(self, n_rows: int) -> "np.ndarray":
        """Return the last step's logits, float32 [n_rows, V], as the sampler left them. No step may be running."""
        return self._runner.last_logits(n_rows)

    def last_hidden(self, n_rows: int) -> "np.ndarray":
        """Return what the last step gave out for a draft head, float32 [n_rows, E]. No step may be running.

        Raises: ShapeError: the program was recorded without.
        """
        found = self.program.hidden
        if found is None:
            raise ShapeError("runner.last_hidden: the program gives no rows out; record it with keeps_hidden")
        place = self.placement.places[found.id]
        return self._runner.last_rows((place.offset_bytes, place.stride_bytes), found.width, n_rows)

    def set_timing(self, *, on: bool) -> None:
        """Measure each op from the next step on; costs some 20 ns an op."""
        self._runner.set_timing(on)

    def take_op_ns(self) -> list[tuple[ops.NativeOp, int]]:
        """Return the time spent in each op since the last call. No step may be running."""
        return list(zip(self.program.ops, self._runner.take_op_ns(), strict=True))

    def close(self) -> None:
        """See `Runner.close`. Weights and pages are given back even while somebody still holds the runner."""
        self._runner.close()
        self.kv = None


def _check_heads(layers: Sequence[KvLayer], kv_dtype: str) -> None:
    """Refuse heads that attention would read wrongly: it loads columns by eights. Latent rows have no int8 form."""
    widths = {width for layer in layers for width in (layer.head_dim, layer.latent_values)}
    wrong = sorted(width for width in widths if width % _HEAD_COLUMNS)
    if kv_dtype == "int8" and any(layer.latent_values for layer in layers):
        raise ConfigError("runner.native: kv_dtype int8; latent rows have no such form; use float16 or float32")
    if wrong:
        raise UnsupportedModel(
            f"runner.native: heads of {wrong[0]} columns; a multiple of {_HEAD_COLUMNS} is needed; choose another model"
        )


def _n_token_ids(program: ops.Lowered) -> int:
    """Return how many ids there are: a pooling program's rows do not tell."""
    table = next((op.w for op in program.ops if isinstance(op, ops.Embed)), None)
    return program.output.width if table is None or not program.is_pooling else table.shape[0]


def _segments(program: ops.Lowered) -> list[ops.EmbedRows]:
    return [op for op in program.ops if isinstance(op, ops.EmbedRows) and op.of == "segment"]


def matrices_of(program: ops.Lowered) -> list[Weight]:
    """Return the weights that a program uses as matrices, each once."""
    found: dict[str, Weight] = {}
    for op in program.ops:
        if isinstance(op, ops.Embed | ops.EmbedRows):
            found[op.w.key] = op.w
        elif isinstance(op, ops.LinearGroup):
            found.update((part.w.key, part.w) for part in op.parts)
        elif isinstance(op, ops.Experts):
            # An expert's matrices next to each other: it is read as one piece of memory.
            families = (w.each() for w in (op.gate, op.up, op.down))
            found.update((one.key, one) for expert in zip(*families, strict=True) for one in expert)
    return list(found.values())


def state_offsets(program: ops.Lowered) -> dict[int, tuple[int, int]]:
    """Return for each layer with state where in a slot's its window and its matrices begin, in bytes."""
    offsets, end = {}, 0
    for layer in program.state_layers:
        offsets[layer.index] = (end, end + layer.conv_bytes)
        end += layer.nbytes
    return offsets


def _place_of(placement: Placement, buffer: ops.Buffer) -> tuple[int, int]:
    where = placement.places[buffer.id]
    return where.offset_bytes, where.stride_bytes


def _at_column(place: tuple[int, int], column: int) -> tuple[int, int]:
    return place[0] + 4 * column, place[1]


def _taps_first(w: "array[float]", width: int) -> "array[float]":
    """Return filters [C, W] as [W, C]."""
    return sum((w[j::width] for j in range(width)), array("f"))


class _Lowering:
    """Hands the ops of a lowered program to the core, one method an op."""

    def __init__(self, recording: "_native.Program", placement: Placement, weights: PackedWeightStore) -> None:
        self._to = recording
        self._placement = placement
        self._weights = weights

    def run(self, program: ops.Lowered, kv_layers: Sequence[KvLayer] | None = None) -> None:
        """`kv_layers` are the pool's, if they are not the program's own: a drafter's program uses some of them."""
        pool = program.kv_layers if kv_layers is None else kv_layers
        self._kv_at = {layer.index: i for i, layer in enumerate(pool)}
        self._state_at = state_offsets(program)
        for op in program.ops:
            getattr(self, f"_{op.kind}")(op)

    def _at(self, buffer: ops.Buffer) -> tuple[int, int]:
        where = self._placement.places[buffer.id]
        return (where.offset_bytes, where.stride_bytes)

    def _maybe(self, weight: Weight | None) -> "array[float] | None":
        return None if weight is None else self._weights.vector(weight)

    def _maybe_at(self, buffer: ops.Buffer | None) -> tuple[int, int] | None:
        return None if buffer is None else self._at(buffer)

    def _rope_table(self, op: ops.RopeTable) -> None:
        self._to.rope_table(array("f", op.inv_freq.values), op.magnitude, self._at(op.y))

    def _embed(self, op: ops.Embed) -> None:
        self._to.embed(self._weights.matrix(op.w), op.scale, self._at(op.y), op.skips_first, self._maybe(op.masked))

    def _norm(self, op: ops.Norm) -> None:
        self._to.norm(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            op.x.width,
            self._weights.vector(op.w),
            op.eps,
            self._maybe_at(op.residual),
            self._at(op.y),
            op.y.kind is ops.BufferKind.Q8,
        )

    def _embed_rows(self, op: ops.EmbedRows) -> None:
        self._to.embed_rows(self._weights.matrix(op.w), op.of == "position", op.first, self._at(op.y))

    def _layer_norm(self, op: ops.LayerNorm) -> None:
        w, bias = self._weights.vector(op.w), self._weights.vector(op.bias)
        self._to.layer_norm(op.y.rows is Dim.ROWS, self._at(op.x), op.x.width, w, bias, op.eps, self._at(op.y))

    def _activate(self, op: ops.Activate) -> None:
        self._to.activate(op.x.rows is Dim.ROWS, self._at(op.x), op.x.width, op.act)

    def _sequence_attention(self, op: ops.SequenceAttention) -> None:
        self._to.sequence_attention(self._at(op.qkv), self._at(op.y), op.n_heads, op.n_kv_heads, op.head_dim, op.scale)

    def _quantize(self, op: ops.Quantize) -> None:
        self._to.quantize(op.y.rows is Dim.ROWS, self._at(op.x), op.x.width, self._at(op.y))

    def _linear_group(self, op: ops.LinearGroup) -> None:
        parts = [
            (self._weights.matrix(p.w), None if p.bias is None else self._weights.vector(p.bias), p.y_col)
            for p in op.parts
        ]
        self._to.linear(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            op.x.kind is ops.BufferKind.Q8,
            op.x.width,
            parts,
            self._at(op.y),
            self._maybe_at(op.residual),
        )

    def _rope_kv(self, op: ops.RopeKv) -> None:
        self._to.rope_kv(
            self._at(op.qkv),
            op.n_heads,
            op.n_kv_heads,
            op.head_dim,
            None if op.q_norm is None else self._weights.vector(op.q_norm),
            None if op.k_norm is None else self._weights.vector(op.k_norm),
            op.eps,
            self._maybe_at(op.cos_sin),
            0 if op.cos_sin is None else op.cos_sin.width // 2,
            self._kv_at[op.layer],
        )

    def _attention(self, op: ops.Attention) -> None:
        self._to.attention(
            op.y.rows is Dim.ROWS,
            self._at(op.q),
            self._at(op.y),
            op.n_heads,
            op.n_kv_heads,
            op.head_dim,
            op.scale,
            op.window,
            op.softcap,
            self._kv_at[op.layer],
            None if op.sinks is None else self._weights.vector(op.sinks),
            op.latent_values,
            op.sees_block,
        )

    def _latent_kv(self, op: ops.LatentKv) -> None:
        self._to.latent_kv(
            self._at(op.latents),
            op.latents.width - op.rope,
            op.rope,
            self._weights.vector(op.norm),
            op.eps,
            self._maybe_at(op.cos_sin),
            op.interleaved,
            self._kv_at[op.layer],
        )

    def _latent_query(self, op: ops.LatentQuery) -> None:
        self._to.latent_query(
            op.y.rows is Dim.ROWS,
            self._at(op.q),
            self._weights.head_matrices(op.w, op.n_heads, op.nope, values=False),
            op.n_heads,
            op.nope,
            op.w.shape[1],
            op.rope,
            self._maybe_at(op.cos_sin),
            op.interleaved,
            self._at(op.y),
        )

    def _latent_out(self, op: ops.LatentOut) -> None:
        self._to.head_linear(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            self._weights.head_matrices(op.w, op.n_heads, op.nope, values=True),
            op.n_heads,
            op.w.shape[1],
            op.y.width // op.n_heads,
            self._at(op.y),
        )

    def _sigmoid_gate(self, op: ops.SigmoidGate) -> None:
        self._to.sigmoid_gate(
            op.y.rows is Dim.ROWS, self._at(op.x), self._at(op.gate), op.x.width, op.gate.width, self._at(op.y)
        )

    def _gated(self, op: ops.Gated) -> None:
        is_quantized = op.y.kind is ops.BufferKind.Q8
        self._to.gated(op.y.rows is Dim.ROWS, self._at(op.x), op.f, op.act, self._at(op.y), is_quantized, *op.params)

    def _select_rows(self, op: ops.SelectRows) -> None:
        self._to.select_rows(self._at(op.x), op.y.width, self._at(op.y))

    def _softcap(self, op: ops.Softcap) -> None:
        self._to.softcap(op.x.rows is Dim.ROWS, self._at(op.x), op.x.width, op.cap)

    def _short_conv(self, op: ops.ShortConv) -> None:
        w = [self._weights.vector(w) for w in op.w]
        bias = [self._weights.vector(b) for b in op.bias]
        self._to.short_conv(
            _at_column(self._at(op.x), op.x_col),
            op.y.width,
            op.width,
            _taps_first(sum(w, array("f")), op.width),
            sum(bias, array("f")) if bias else None,
            op.act == "silu",
            self._at(op.y),
            self._state_at[op.layer][0],
        )

    def _delta_rule(self, op: ops.DeltaRule) -> None:
        self._to.delta_rule(
            self._at(op.qkv),
            _at_column(self._at(op.gate), op.gate_col),
            _at_column(self._at(op.beta), op.beta_col),
            (op.key_heads, op.value_heads, op.key_dim, op.value_dim),
            op.lower_bound,
            self._weights.vector(op.a_log),
            self._weights.vector(op.dt_bias),
            op.eps,
            self._at(op.y),
            self._state_at[op.layer][1],
        )

    def _delta_layer(self, op: ops.DeltaLayer) -> None:
        w = [self._weights.vector(w) for w in op.w]
        bias = [self._weights.vector(b) for b in op.bias]
        taps = _taps_first(sum(w, array("f")), op.width)
        x = _at_column(self._at(op.x), op.x_col)
        gate, beta = _at_column(self._at(op.gate), op.gate_col), _at_column(self._at(op.beta), op.beta_col)
        heads = (op.key_heads, op.value_heads, op.key_dim, op.value_dim)
        a_log, dt_bias = self._weights.vector(op.a_log), self._weights.vector(op.dt_bias)
        norm = None if op.norm is None else self._weights.vector(op.norm)
        z = _at_column(self._at(op.z), op.z_col)
        self._to.delta_layer(
            (x, op.channels, op.width, taps, sum(bias, array("f")) if bias else None, op.act == "silu"),
            (gate, beta, heads, op.lower_bound, a_log, dt_bias, op.eps),
            (z, op.is_gate_per_head, norm, op.norm_eps, op.norm_act == "sigmoid"),
            self._at(op.y),
            self._state_at[op.layer],
        )

    def _gated_norm(self, op: ops.GatedNorm) -> None:
        self._to.gated_norm(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            _at_column(self._at(op.z), op.z_col),
            op.is_gate_per_head,
            op.heads,
            op.y.width // op.heads,
            None if op.w is None else self._weights.vector(op.w),
            op.eps,
            op.act == "sigmoid",
            self._at(op.y),
            op.act == "none",
        )

    def _ssd(self, op: ops.Ssd) -> None:
        self._to.ssd(
            self._at(op.xbc),
            _at_column(self._at(op.dt), op.dt_col),
            (op.heads, op.head_dim, op.groups, op.state_dim),
            (op.dt_min, op.dt_max),
            self._weights.vector(op.a_log),
            self._weights.vector(op.dt_bias),
            self._weights.vector(op.d),
            self._at(op.y),
            self._state_at[op.layer][1],
        )

    def _gate_norm(self, op: ops.GateNorm) -> None:
        self._to.gate_norm(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            _at_column(self._at(op.z), op.z_col),
            op.groups,
            op.y.width // op.groups,
            self._weights.vector(op.w),
            op.eps,
            self._at(op.y),
        )

    def _add(self, op: ops.Add) -> None:
        self._to.add(op.x.rows is Dim.ROWS, self._at(op.x), self._at(op.y), op.x.width)

    def _router(self, op: ops.Router) -> None:
        r = op.routing
        self._to.router(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            self._at(op.y),
            r.n_experts,
            r.top_k,
            r.scores,
            None if op.bias is None else self._weights.vector(op.bias),
            r.n_groups,
            r.n_groups_kept,
            r.group_top,
            r.renormalises,
            r.scale,
        )

    def _experts(self, op: ops.Experts) -> None:
        p0, p1 = (*op.params, 0.0, 0.0)[:2]
        biases = (op.gate_bias, op.up_bias, op.down_bias)
        self._to.experts(
            op.y.rows is Dim.ROWS,
            self._at(op.x),
            op.x.kind is ops.BufferKind.Q8,
            self._at(op.route),
            op.route.width // 2,
            self._family(op.gate),
            self._family(op.up),
            self._family(op.down),
            [None if bias is None else self._joined(bias) for bias in biases],
            op.rounds_hidden,
            op.act,
            p0,
            p1,
            self._at(op.y),
        )

    def _residual_mix(self, op: ops.ResidualMix) -> None:
        norm, w = self._weights.vector(op.norm), self._weights.vector(op.w)
        both = array("f", (a * b for a, b in zip(norm, w, strict=True)))
        sources = [self._at(source) for source in op.sources]
        self._to.residual_mix(op.y.rows is Dim.ROWS, sources, op.y.width, both, op.eps, self._at(op.y))

    def _given(self, op: ops.Given) -> None:
        self._to.given(op.y.width, self._at(op.y))

    def _join(self, op: ops.Join) -> None:
        places = (self._at(op.x), op.x.width, self._at(op.z), op.z.width, self._at(op.y))
        self._to.join(op.y.rows is Dim.ROWS, *places)

    def _block_conv(self, op: ops.BlockConv) -> None:
        width, groups = op.x.width, op.x.width // op.group
        n = op.taps * width
        base = self._weights.vector(op.base)[op.side * n : (op.side + 1) * n]
        delta = _at_column(self._at(op.delta), op.side * op.taps * groups)
        self._to.block_conv(self._at(op.x), width, delta, op.taps, op.group, base, self._at(op.y))

    def _scale(self, op: ops.Scale) -> None:
        self._to.scale(op.x.rows is Dim.ROWS, self._at(op.x), op.x.width, op.factor)

    def _family(self, weight: Weight) -> list[_native.PackedMatrix]:
        return [self._weights.matrix(one) for one in weight.each()]

    def _joined(self, biases: Weight) -> "array[float]":
        """Return all experts' vectors, one behind the other."""
        joined = array("f")
        for one in biases.each():
            joined += self._weights.vector(one)
        return joined
