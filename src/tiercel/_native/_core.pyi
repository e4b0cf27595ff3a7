"""Types of the compiled core; `tests/meta/test_native_stub.py` holds them against the built module.

What each call does stands in `native/include/tiercel/` and in the docstrings that `native/bind/` gives. An array that
is written to must have exactly the type named here; others are converted.
"""

import mmap
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]
_Words = npt.NDArray[np.uint32]
_Floats = npt.NDArray[np.float32]
_AnyInts = _Ints | array[int] | memoryview
_AnyBools = _Bools | memoryview[bool]
_Rows = tuple[memoryview, memoryview, memoryview]
_AnyFloats = _Floats | array[float] | memoryview[float]
_Bytes = npt.NDArray[np.uint8]
_Buffer = tuple[int, int]  # offset and stride in bytes, in the program's arena
_Part = tuple[PackedMatrix, _AnyFloats | None, int]  # matrix, bias, first column of y
_Odds = Sequence[tuple[Sequence[int], Sequence[float]]]  # of each draft: ids, and their chances
_Sampled = tuple[int, float, int, list[int], list[float]]  # token, logprob, rank, top ids, top logprobs

def kernel_levels() -> list[str]: ...
def measure_rate(level: str, kind: str, n_threads: int, working_set_bytes: int = 0) -> float: ...

class PackedArena:
    def __init__(self) -> None: ...

class PackedMatrix:
    def __new__(
        cls,
        format: int,
        rows: _Bytes,
        k: int,
        row_order: _Ints | None = None,
        expand_to_f32: bool = False,
        arena: PackedArena | None = None,
        n_threads: int = 1,
    ) -> PackedMatrix: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def format(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_finite(self) -> bool: ...

class Packing:
    def __init__(
        self,
        jobs: Sequence[tuple[int, _Bytes | memoryview, int, _Ints | memoryview | None, bool]],
        arena: PackedArena,
        n_threads: int,
        releases: bool,
    ) -> None: ...
    def join(self) -> list[PackedMatrix]: ...

def gather(buffer: _Bytes | mmap.mmap, ranges: Sequence[tuple[int, int]]) -> bytes: ...
def quant_row_bytes(k: int) -> int: ...

class Program:
    def __init__(self, level: str, n_threads: int) -> None: ...
    def rope_table(self, inv_freq: _AnyFloats, magnitude: float, out: _Buffer) -> None: ...
    def embed(
        self, w: PackedMatrix, scale: float, y: _Buffer, skips_first: bool = False, masked: _AnyFloats | None = ...
    ) -> None: ...
    def norm(
        self,
        logits_rows: bool,
        x: _Buffer,
        width: int,
        w: _AnyFloats,
        eps: float,
        residual: _Buffer | None,
        y: _Buffer,
        quantized: bool,
    ) -> None: ...
    def quantize(self, logits_rows: bool, x: _Buffer, width: int, y: _Buffer) -> None: ...
    def linear(
        self,
        logits_rows: bool,
        x: _Buffer,
        quantized: bool,
        k: int,
        parts: Sequence[_Part],
        y: _Buffer,
        residual: _Buffer | None,
    ) -> None: ...
    def rope_kv(
        self,
        qkv: _Buffer,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        q_norm: _AnyFloats | None,
        k_norm: _AnyFloats | None,
        eps: float,
        cos_sin: _Buffer | None,
        d2: int,
        layer: int,
    ) -> None: ...
    def attention(
        self,
        logits_rows: bool,
        q: _Buffer,
        y: _Buffer,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        layer: int,
        sinks: _AnyFloats | None = ...,
        latent_values: int = ...,
        sees_block: bool = ...,
    ) -> None: ...
    def gated(
        self,
        logits_rows: bool,
        x: _Buffer,
        f: int,
        act: str,
        y: _Buffer,
        quantized: bool,
        p0: float = 0.0,
        p1: float = 0.0,
    ) -> None: ...
    def select_rows(self, x: _Buffer, width: int, y: _Buffer) -> None: ...
    def softcap(self, logits_rows: bool, x: _Buffer, width: int, cap: float) -> None: ...
    def add(self, logits_rows: bool, x: _Buffer, y: _Buffer, width: int) -> None: ...
    def router(
        self,
        logits_rows: bool,
        x: _Buffer,
        y: _Buffer,
        n_experts: int,
        top_k: int,
        scores: str,
        bias: _AnyFloats | None,
        n_groups: int,
        n_groups_kept: int,
        group_top: int,
        renormalises: bool,
        scale: float,
    ) -> None: ...
    def experts(
        self,
        logits_rows: bool,
        x: _Buffer,
        quantized: bool,
        route: _Buffer,
        top_k: int,
        gate: Sequence[PackedMatrix],
        up: Sequence[PackedMatrix],
        down: Sequence[PackedMatrix],
        biases: Sequence[_AnyFloats | None],
        hidden_quantized: bool,
        act: str,
        p0: float,
        p1: float,
        y: _Buffer,
    ) -> None: ...
    def latent_kv(
        self,
        latents: _Buffer,
        rank: int,
        rope: int,
        norm: _AnyFloats,
        eps: float,
        cos_sin: _Buffer | None,
        interleaved: bool,
        layer: int,
    ) -> None: ...
    def latent_query(
        self,
        logits_rows: bool,
        q: _Buffer,
        w: _AnyFloats,
        n_heads: int,
        k: int,
        rank: int,
        rope: int,
        cos_sin: _Buffer | None,
        interleaved: bool,
        y: _Buffer,
    ) -> None: ...
    def head_linear(
        self, logits_rows: bool, x: _Buffer, w: _AnyFloats, n_heads: int, k: int, n: int, y: _Buffer
    ) -> None: ...
    def sigmoid_gate(
        self, logits_rows: bool, x: _Buffer, gate: _Buffer, width: int, gate_width: int, y: _Buffer
    ) -> None: ...
    def short_conv(
        self,
        x: _Buffer,
        channels: int,
        width: int,
        w: _AnyFloats,
        bias: _AnyFloats | None,
        has_silu: bool,
        y: _Buffer,
        state_offset: int,
    ) -> None: ...
    def delta_rule(
        self,
        qkv: _Buffer,
        gate: _Buffer,
        beta: _Buffer,
        heads: tuple[int, int, int, int],
        lower_bound: float,
        a_log: _AnyFloats,
        dt_bias: _AnyFloats,
        eps: float,
        y: _Buffer,
        state_offset: int,
    ) -> None: ...
    def gated_norm(
        self,
        logits_rows: bool,
        x: _Buffer,
        z: _Buffer,
        is_gate_per_head: bool,
        heads: int,
        head_dim: int,
        w: _AnyFloats | None,
        eps: float,
        is_sigmoid: bool,
        y: _Buffer,
        is_plain: bool = False,
    ) -> None: ...
    def ssd(
        self,
        xbc: _Buffer,
        dt: _Buffer,
        sizes: tuple[int, int, int, int],
        limits: tuple[float, float],
        a_log: _AnyFloats,
        dt_bias: _AnyFloats,
        d: _AnyFloats,
        y: _Buffer,
        state_offset: int,
    ) -> None: ...
    def gate_norm(
        self,
        logits_rows: bool,
        x: _Buffer,
        z: _Buffer,
        groups: int,
        group_dim: int,
        w: _AnyFloats,
        eps: float,
        y: _Buffer,
    ) -> None: ...
    def delta_layer(
        self,
        conv: tuple[_Buffer, int, int, _AnyFloats, _AnyFloats | None, bool],
        rule: tuple[_Buffer, _Buffer, tuple[int, int, int, int], float, _AnyFloats, _AnyFloats, float],
        norm: tuple[_Buffer, bool, _AnyFloats | None, float, bool],
        y: _Buffer,
        state_offsets: tuple[int, int],
    ) -> None: ...
    def embed_rows(self, w: PackedMatrix, is_position: bool, first: int, y: _Buffer) -> None: ...
    def layer_norm(
        self, logits_rows: bool, x: _Buffer, width: int, w: _AnyFloats, bias: _AnyFloats, eps: float, y: _Buffer
    ) -> None: ...
    def activate(self, logits_rows: bool, x: _Buffer, width: int, act: str) -> None: ...
    def sequence_attention(
        self, qkv: _Buffer, y: _Buffer, n_heads: int, n_kv_heads: int, head_dim: int, scale: float
    ) -> None: ...
    def residual_mix(
        self, logits_rows: bool, sources: Sequence[_Buffer], width: int, w: _AnyFloats, eps: float, y: _Buffer
    ) -> None: ...
    def given(self, width: int, y: _Buffer) -> None: ...
    def join(self, logits_rows: bool, x: _Buffer, x_width: int, z: _Buffer, z_width: int, y: _Buffer) -> None: ...
    def block_conv(
        self, x: _Buffer, width: int, delta: _Buffer, taps: int, group: int, base: _AnyFloats, y: _Buffer
    ) -> None: ...
    def scale(self, logits_rows: bool, x: _Buffer, width: int, factor: float) -> None: ...

class KvMemory:
    @property
    def page_bytes(self) -> int: ...
    @property
    def n_pages(self) -> int: ...
    def page(self, page: int) -> _Bytes: ...
    def read(self, page: int, data: memoryview) -> None: ...
    def write(self, page: int, data: bytes | bytearray | memoryview) -> None: ...

def make_kv(
    n_pages: int,
    page_tokens: int,
    kv_dtype: str,
    layers: Sequence[tuple[int, int]],
    latent_layers: Sequence[int] = ...,
) -> KvMemory: ...

class Drafting:
    def __init__(
        self,
        modules: Sequence[tuple[Program, int, _Buffer, _Buffer | None]],
        head: DraftHead,
        kind: str,
        n_draft_max: int,
        block: tuple[int, int, int],
        max_rows: tuple[int, int],
        target_hidden: _Buffer | None = None,
        draws: str = "coupled",
    ) -> None: ...

def choose_drafts(
    confidence: Sequence[Sequence[float]],
    n_rows: int,
    step_seconds: Sequence[float],
    chances: Sequence[float],
    stops_early: bool = False,
) -> list[int]: ...

class StepRunner:
    def __init__(
        self,
        program: Program,
        kv: KvMemory,
        arena_bytes: int,
        logits: _Buffer,
        vocab: int,
        n_slots: int,
        max_len: int,
        max_tokens: int,
        max_rows: int,
        cpus: Sequence[int],
        n_token_ids: int,
        is_pooling: bool = False,
        state_slot_bytes: int = 0,
        n_snapshots: int = 0,
        max_trial_rows: int = 0,
        drafting: Drafting | None = None,
        verification: str = "matching",
    ) -> None: ...
    def admit(
        self, slot: int, tokens: _AnyInts, n_prompt: int, params: SamplerParams, n_first: int | None = None
    ) -> None: ...
    def set_pages(self, slot: int, first: int, pages: _AnyInts) -> None: ...
    def save_state(self, slot: int, snapshot: int) -> None: ...
    def load_state(self, slot: int, snapshot: int) -> None: ...
    def read_snapshot(self, snapshot: int) -> bytes: ...
    def write_snapshot(self, snapshot: int, data: _Bytes | memoryview) -> None: ...
    def submit(
        self,
        step_id: int,
        slot: _AnyInts,
        start: _AnyInts,
        tokens: _AnyInts,
        samples: _AnyBools,
        scores: _AnyBools,
        n_top: int,
        masked: _AnyBools | None = None,
        given: _Floats | None = None,
        drafts: tuple[_AnyInts, _AnyInts, _AnyInts] | None = None,
        saves: tuple[_AnyInts, _AnyInts] | None = None,
        n_draft: int = 0,
    ) -> None: ...
    def set_draft_policy(self, step_seconds: Sequence[float], chances: Sequence[float]) -> None: ...
    def n_bad_drafts(self) -> int: ...
    def set_masks(self, step_id: int, masks: _Words) -> None: ...
    def wait(self, n: int) -> int: ...
    def hurry(self) -> None: ...
    def collect(
        self,
    ) -> tuple[
        int,
        *_Rows,
        _Floats | None,
        _Ints | None,
        _Ints | None,
        _Floats | None,
        int,
        _Floats | None,
        memoryview | None,
        memoryview | None,
        memoryview[float] | None,
        int,
    ]: ...
    def tokens(self, slot: int, n: int) -> _Ints: ...
    def last_logits(self, n_rows: int) -> _Floats: ...
    def last_rows(self, at: _Buffer, width: int, n_rows: int) -> _Floats: ...
    def set_timing(self, on: bool) -> None: ...
    def take_op_ns(self) -> list[int]: ...
    def close(self) -> None: ...

class SuffixTree:
    def __init__(self, max_depth: int, max_bytes: int) -> None: ...
    def begin(self) -> int: ...
    def extend(self, text: int, tokens: _AnyInts) -> bool: ...
    def propose(
        self, context: _AnyInts, n_max: int, factor: float, min_probability: float
    ) -> tuple[list[int], list[float], int, float]: ...
    def count(self, run: _AnyInts) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def n_nodes(self) -> int: ...

class SamplerParams: ...

def make_sampler_params(
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = [],
    logit_bias: Sequence[tuple[int, float]] = [],
    allowed_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = [],
    told_ids: Sequence[int] = [],
) -> SamplerParams: ...

class DraftHead:
    @property
    def vocab(self) -> int: ...
    @property
    def hidden_width(self) -> int: ...
    def pick(
        self,
        logits: _Floats,
        hidden: _Floats | None,
        anchor: int,
        params: SamplerParams | None = None,
        position: int = 0,
    ) -> tuple[list[int], list[float]]: ...
    def pick_apart(
        self,
        logits: _Floats,
        hidden: _Floats | None,
        anchor: int,
        params: SamplerParams | None = None,
        position: int = 0,
    ) -> tuple[list[int], list[float], _Odds]: ...

def make_draft_head(
    kind: str,
    vocab: int,
    target_vocab: int,
    weights: Mapping[str, _AnyFloats],
    *,
    markov: str = "vanilla",
    topk: int = 0,
    confidence_reads_markov: bool = False,
    d2t: _AnyInts | None = None,
    level: int | None = None,
) -> DraftHead: ...

# Doors for tests: the engine replays programs and never comes this way.

def sample_row(
    logits: _Floats,
    params: SamplerParams,
    tokens: _Ints,
    n_prompt: int,
    *,
    n_top: int | None = None,
    level: int | None = None,
    mask: _Words | None = None,
) -> _Sampled: ...
def score_row(logits: _Floats, token: int, *, n_top: int = 0, level: int | None = None) -> _Sampled: ...
def verify_drafts(
    how: str,
    logits: _Floats,
    drafts: Sequence[int],
    odds: _Odds,
    params: SamplerParams,
    tokens: _Ints,
    n_prompt: int,
) -> list[int]: ...
def linear(
    level: str,
    parts: Sequence[_Part],
    x: _Floats,
    y: _Floats,
    residual: _Floats | None = None,
    n_threads: int = 1,
) -> None: ...
def embed(
    level: str,
    matrix: PackedMatrix,
    ids: _Ints,
    y: _Floats,
    scale: float = 1.0,
    n_threads: int = 1,
    masked: _Floats | None = None,
) -> None: ...
def quantize_rows(level: str, x: _Floats, q: npt.NDArray[np.int8], scale: _Floats, n_threads: int = 1) -> None: ...
def norm(
    level: str, n_threads: int, x: _Floats, w: _Floats, *, eps: float, add_to_y: bool = False, y: _Floats
) -> None: ...
def gated(
    level: str, n_threads: int, x: _Floats, *, act: str, y: _Floats, p0: float = 0.0, p1: float = 0.0
) -> None: ...
def router(
    level: str,
    n_threads: int,
    x: _Floats,
    *,
    top_k: int,
    scores: str,
    bias: _Floats | None = None,
    n_groups: int = 1,
    n_groups_kept: int = 1,
    group_top: int = 1,
    renormalises: bool = True,
    scale: float = 1.0,
    y: _Floats,
) -> None: ...
def experts(
    level: str,
    n_threads: int,
    x: _Floats,
    route: _Floats,
    gate: Sequence[PackedMatrix],
    up: Sequence[PackedMatrix],
    down: Sequence[PackedMatrix],
    *,
    biases: Sequence[_Floats | None],
    act: str,
    p0: float = 0.0,
    p1: float = 0.0,
    rows_at_once: int = 64,
    y: _Floats,
) -> None: ...
def rope_table(
    level: str, n_threads: int, seq_start: _Ints, seq_rows: _Ints, inv_freq: _Floats, *, magnitude: float, y: _Floats
) -> None: ...
def rope_kv(
    level: str,
    n_threads: int,
    seq_slot: _Ints,
    seq_start: _Ints,
    seq_rows: _Ints,
    page_table: _Ints,
    cos_sin: _Floats,
    norms: _Floats,
    *,
    eps: float,
    n_heads: int,
    n_kv_heads: int,
    page_tokens: int,
    kv_dtype: str,
    qkv: _Floats,
    pool: _Bytes,
) -> None: ...
def attention(
    level: str,
    n_threads: int,
    seq_slot: _Ints,
    seq_start: _Ints,
    seq_rows: _Ints,
    page_table: _Ints,
    q: _Floats,
    *,
    n_heads: int,
    n_kv_heads: int,
    page_tokens: int,
    kv_dtype: str,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: _Floats,
    pool: _Bytes,
    y: _Floats,
) -> None: ...
def select_rows(level: str, n_threads: int, x: _Floats, logits_rows: _Ints, *, y: _Floats) -> None: ...
def softcap(level: str, n_threads: int, *, cap: float, x: _Floats) -> None: ...
def add(level: str, n_threads: int, y: _Floats, *, x: _Floats) -> None: ...
def short_conv(
    level: str,
    n_threads: int,
    seq_slot: _Ints,
    seq_start: _Ints,
    seq_rows: _Ints,
    x: _Floats,
    w: _Floats,
    *,
    bias: _Floats | None = None,
    has_silu: bool,
    y: _Floats,
    state: _Floats,
) -> None: ...
def delta_rule(
    level: str,
    n_threads: int,
    seq_slot: _Ints,
    seq_start: _Ints,
    seq_rows: _Ints,
    qkv: _Floats,
    gate: _Floats,
    beta: _Floats,
    a_log: _Floats,
    dt_bias: _Floats,
    *,
    key_heads: int,
    key_dim: int,
    lower_bound: float,
    eps: float,
    y: _Floats,
    state: _Floats,
) -> None: ...
def gated_norm(
    level: str,
    n_threads: int,
    x: _Floats,
    z: _Floats,
    *,
    heads: int,
    w: _Floats | None,
    eps: float,
    is_sigmoid: bool,
    y: _Floats,
    is_plain: bool = False,
) -> None: ...
def ssd(
    level: str,
    n_threads: int,
    seq_slot: _Ints,
    seq_start: _Ints,
    seq_rows: _Ints,
    xbc: _Floats,
    dt: _Floats,
    a_log: _Floats,
    dt_bias: _Floats,
    d: _Floats,
    *,
    groups: int,
    limits: tuple[float, float],
    y: _Floats,
    state: _Floats,
) -> None: ...
def gate_norm(
    level: str,
    n_threads: int,
    x: _Floats,
    z: _Floats,
    *,
    groups: int,
    w: _Floats,
    eps: float,
    y: _Floats,
) -> None: ...
def argmax(level: str, x: _Floats) -> int: ...
def read_file(path: str, buffer: memoryview, past_cache: bool) -> int: ...
def crc32(data: bytes | bytearray | memoryview, crc: int = 0) -> int: ...

class Background:
    def __init__(self) -> None: ...
    def cpu_s(self) -> float: ...
    def create(self, path: str) -> int: ...
    def write(self, fd: int, data: bytes | bytearray | memoryview) -> int: ...
    def rename(self, path: str, to: str) -> None: ...
