"""The composition root: from a person's options to a running engine. The only file that knows every part.

Order: find the files, read the config, record the program, size the pool, then pack weights while another thread builds
the tokenizer. Nothing is computed before everything is known to fit.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tiercel.base import env, machine
from tiercel.base.config import EngineOptions, engine_rows
from tiercel.base.errors import ConfigError, ModelFileError, OutOfPages, TiercelError
from tiercel.base.units import GIB
from tiercel.hub.resolve import ResolvedModel, resolve
from tiercel.hub.store import default_folder
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiercel.engine.client import EngineClient
    from tiercel.engine.config import EngineConfig
    from tiercel.engine.pooling import Pooler
    from tiercel.engine.speculation import Speculation
    from tiercel.kv.tiers.placed import MakeTiers
    from tiercel.kv.tiers.registry import TierSpec
    from tiercel.loaders.checkpoint import Checkpoint
    from tiercel.loaders.sentence_files import SentenceFiles
    from tiercel.models.info import ModelInfo
    from tiercel.models.model import Model
    from tiercel.models.pooling import PoolingSpec
    from tiercel.ops.lowered import Lowered
    from tiercel.ops.place import Placement
    from tiercel.ops.program import Program, Weight
    from tiercel.runner import capacity as sizing
    from tiercel.runner.native import NativeRunner
    from tiercel.runner.ready import Begun, ReadyWeights
    from tiercel.runner.sizes import ModelSizes
    from tiercel.sampling.grammar_limits import GrammarLimits
    from tiercel.spec.settings import SpeculationSettings
    from tiercel.text.conversation import Conversations
    from tiercel.text.thinking_budget import ReasoningConfig
    from tiercel.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_FLOATS = (Format.F32, Format.F16, Format.BF16)
_DTYPE_FORMATS = {"float32": Format.F32, "float16": Format.F16, "bfloat16": Format.BF16}
# Slots when the options name none: on a CPU the step is compute-bound long before.
_MAX_NUM_SEQS = 64


class PlannedTensor(msgspec.Struct, frozen=True):
    """A checkpoint's tensor as it will be used: its shape, and the format it has or will be given."""

    shape: tuple[int, ...]
    format: Format


class Plan(msgspec.Struct, frozen=True):
    """What is decided before weights are touched."""

    options: EngineOptions
    resolved: ResolvedModel
    checkpoint: "Checkpoint"
    info: "ModelInfo"
    lowered: "Lowered"
    capacity: "sizing.Capacity"
    n_threads: int
    identity: str  # digest of all that decides the model's numbers
    placement: "Placement | None" = None  # of `lowered`, if it is known already
    pooling: "PoolingSpec | None" = None  # of a model that pools

    @property
    def model(self) -> "Model":
        """The model, built of the checkpoint's config."""
        return _model_of(self.options.runner, self.checkpoint)[0]

    @property
    def program(self) -> "Program":
        """The program as it is recorded; `lowered` is made of it."""
        return _record(self.options, self.checkpoint, self.model, self.capacity.max_len_tokens)

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """What a request gets that is silent about how it is sampled, in the form of generation_config.json.

        Raises: ConfigError: the folder that the options name has none, or what is to overrule it is no such value.
        """
        if self.options.override_generation_config:
            from tiercel.sampling.defaults import check_overrides

            check_overrides(self.options.override_generation_config)
        named = self.options.generation_config
        found: Mapping[str, Any] = {}
        if named == "auto":
            found = self.checkpoint.generation_config
        elif named != "vllm":
            found = _read_generation_config(Path(named).expanduser())
        return {**found, **self.options.override_generation_config}

    @property
    def kv_dtype(self) -> str:
        """Element type of the pool."""
        return _kv_dtype(self.options)

    @property
    def is_prefix_caching(self) -> bool:
        """Whether computed beginnings of prompts are used again: unless the options say no, or states have no room."""
        has_room = not self.info.state_layers or self.capacity.n_snapshots > 0
        return self.options.enable_prefix_caching is not False and has_room

    @property
    def is_float32_compute(self) -> bool:
        """Whether activations are never rounded."""
        return self.options.compute_dtype == "float32"


class Engine(msgspec.Struct, frozen=True):
    """A running engine and what front ends may know of it. `close` ends it."""

    plan: Plan
    runner: "NativeRunner"
    client: "EngineClient"
    tokenizer: "Tokenizer | None"
    conversations: "Conversations"

    def close(self) -> None:
        """Abort what runs, stop the threads, give back memory. Idempotent."""
        self.client.close()
        self.plan.checkpoint.close()


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"generation_config: got {str(folder)!r}; its generation_config.json cannot be read ({error}); "
            "auto, vllm or a folder with that file is needed"
        ) from None
    return found


def _resolve(options: EngineOptions) -> ResolvedModel:
    return resolve(
        options.model, revision=options.revision, hf_token=options.hf_token, download_dir=options.download_dir
    )


def _tell_unread() -> None:
    """Log, once a start, the variables of vLLM's that are set and not read here."""
    told = env.unread()
    if told:
        import logging

        logging.getLogger(__name__).warning("%s", told)


def make_plan(options: EngineOptions, resolved: ResolvedModel | None = None) -> Plan:
    """Find and read the model and size everything; no weight is read but for the digest."""
    from tiercel.loaders.checkpoint import open_checkpoint

    resolved = resolved or _resolve(options)
    checkpoint = open_checkpoint(resolved.path)
    try:
        return _plan_checkpoint(options, resolved, checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def _plan_checkpoint(options: EngineOptions, resolved: ResolvedModel, checkpoint: "Checkpoint") -> Plan:
    from tiercel.models.weights import check_weights
    from tiercel.ops.passes import lower_and_fuse

    model, files = _model_of(options.runner, checkpoint)
    if model.pooling is not None:
        checkpoint = checkpoint.with_prefix("model.", model.expected_weights())
    checkpoint = checkpoint.fitted(model.expected_weights(), model.other_shapes)
    check_weights(model, checkpoint.tensors)
    _check_dtype(options.dtype, checkpoint, model.expected_weights())
    info, pooling = _pooling_of(model, files)
    capacity = _capacity(options, info)
    program = _record(options, checkpoint, model, capacity.max_len_tokens)
    # The program's text holds the config, the formats and the rotary tables: all arithmetic but the weights' values.
    identity = hashlib.sha256(f"{checkpoint.digest()}\n{options.compute_dtype}\n{program.text()}".encode()).hexdigest()
    n_threads = options.threads or machine.usable_cpus()
    lowered = lower_and_fuse(program)
    return Plan(options, resolved, checkpoint, info, lowered, capacity, n_threads, identity, pooling=pooling)


def _model_of(runner: str, checkpoint: "Checkpoint") -> "tuple[Model, SentenceFiles | None]":
    """Return the checkpoint's model, and what sentence-transformers' files beside it say.

    Raises: ConfigError: it does not do what `runner` names.
    """
    from tiercel.loaders.sentence_files import read_sentence_files
    from tiercel.models.registry import build_model

    files = read_sentence_files(checkpoint.path) if checkpoint.kind == "safetensors" else None
    is_embedder = runner == "pooling" or (runner == "auto" and files is not None and files.method is not None)
    model = build_model(checkpoint.config, is_embedder=is_embedder)
    if runner == "generate" and model.pooling is not None:
        raise ConfigError(f'runner: got "generate"; {model.info.architecture} pools; leave it out')
    return model, files


def _pooling_of(model: "Model", files: "SentenceFiles | None") -> "tuple[ModelInfo, PoolingSpec | None]":
    """Return the model's facts and how it pools; the files' word counts over the model's."""
    info, spec = model.info, model.pooling
    if spec is None or files is None:
        return info, spec
    if files.max_len_tokens is not None:
        info = msgspec.structs.replace(info, max_len_tokens=min(info.max_len_tokens, files.max_len_tokens))
    if "embed" in spec.tasks:
        method = files.method or spec.method
        spec = msgspec.structs.replace(spec, method=method, is_normalised=files.is_normalised)
    return info, spec


def _kv_dtype(options: EngineOptions) -> str:
    return "float16" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype


def _capacity(options: EngineOptions, info: "ModelInfo") -> "sizing.Capacity":
    from tiercel.runner import capacity as sizing

    if _kv_dtype(options) not in info.kv_dtypes:
        raise ConfigError(
            f"kv_cache_dtype: got {options.kv_cache_dtype}; {info.architecture} keeps latent rows, which are keys and "
            f"values at once and have no such form; use auto, {' or '.join(info.kv_dtypes)}"
        )
    available = machine.available_bytes()
    usual = min(_MAX_NUM_SEQS, options.max_num_batched_tokens)
    capacity = sizing.plan(
        kv_token_bytes=info.kv_bytes_per_token(_kv_dtype(options)),
        page_size_tokens=options.block_size,
        model_len_tokens=info.max_len_tokens,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs or sizing.slots_for(info.state_bytes, usual, available),
        pool_bytes=options.kv_cache_memory_bytes,
        available_bytes=available,
        state_bytes=info.state_bytes,
        keeps_states=options.enable_prefix_caching is not False,
        extra_bytes=int((options.kv_offloading_size or 0) * GIB),
    )
    if options.enable_prefix_caching and info.state_bytes and not capacity.n_snapshots:
        raise OutOfPages(
            f"enable_prefix_caching: {info.architecture} needs room for a recurrent state of "
            f"{info.state_bytes / (1 << 20):,.2f} MiB, and pages leave none; raise kv_cache_memory_bytes, lower "
            "max_model_len or leave the option out"
        )
    return capacity


def _record(options: EngineOptions, checkpoint: "Checkpoint", model: "Model", max_len_tokens: int) -> "Program":
    from tiercel.ops.recorder import ComputeDtype

    return model.record(
        planned_tensors(checkpoint, model.expected_weights(), options.quantization),
        compute_dtype=ComputeDtype.FLOAT32 if options.compute_dtype == "float32" else ComputeDtype.AUTO,
        max_len_tokens=max_len_tokens,
        norm_weights_include_one=checkpoint.norm_weights_include_one,
    )


def _check_dtype(dtype: str, checkpoint: "Checkpoint", expected: Mapping[str, tuple[int, ...]]) -> None:
    if dtype == "auto":
        return
    wanted = _DTYPE_FORMATS[dtype]
    for name, shape in expected.items():
        found = checkpoint.tensors[name].format
        if len(shape) == 2 and found is not wanted:
            raise ConfigError(
                f'dtype: got "{dtype}"; tensor {name} is {found} in the file and is used as it is; use "auto"'
            )


def planned_tensors(
    checkpoint: "Checkpoint", expected: Mapping[str, tuple[int, ...]], quantization: str | None
) -> dict[str, PlannedTensor]:
    """Return shape and format of each tensor as it will be used.

    With a quantization, float matrices get that format; the embedding and the head get q8_0 under q4_0 too, as they
    cost most quality and are a small part of a step.

    Raises: ConfigError: the checkpoint is quantised already.
    """
    wanted = None if quantization in (None, "none") else Format(quantization)
    planned = {}
    for name, shape in expected.items():
        found = checkpoint.tensors[name].format
        if wanted is not None and found not in _FLOATS:
            raise ConfigError(
                f"quantization: got {quantization!r}; tensor {name} is {found} already; "
                "leave the option out for a quantised file"
            )
        # A router's choice is as good as its logits, and its matrix is small.
        # So are the matrices of gates that weigh experts, and of a recurrent state's decays and betas.
        is_gate = name.endswith((".gate.weight", "_expert_gate.weight", "in_proj_a.weight", "in_proj_b.weight"))
        is_gate |= name.endswith(("in_proj_ba.weight", ".b_proj.weight", ".f_a_proj.weight", ".f_b_proj.weight"))
        is_gate |= name.endswith("_res_proj.weight")
        if wanted is not None and len(shape) == 2 and shape[1] % 32 == 0 and not is_gate:
            is_table = "embed_tokens" in name or "embeddings." in name or name.endswith("lm_head.weight")
            found = Format.Q8_0 if is_table else wanted
        planned[name] = PlannedTensor(shape, found)
    return planned


def build_runner(plan: Plan, ready: "ReadyWeights | None" = None) -> "NativeRunner":
    """Pack the weights, but those that are `ready`, and start the native runner.

    Raises: OutOfPages: there is not the memory; ConfigError: there are not the threads.
    """
    from tiercel.runner.native import NativeRunner, NativeSettings
    from tiercel.runner.weights import PackedWeightStore

    _tell_quantization(plan.checkpoint)
    weights = PackedWeightStore(
        plan.checkpoint.tensors,
        expand_to_f32=plan.is_float32_compute,
        n_threads=plan.n_threads,
        releases=True,
        ready=ready,
    )
    max_step_tokens = max(plan.options.max_num_batched_tokens, plan.capacity.max_num_seqs)
    n_drafts = n_draft_rows(plan)
    settings = NativeSettings(
        max_step_tokens=max_step_tokens + n_drafts,
        max_logits_rows=max_step_tokens
        if plan.pooling is not None
        else min(max_step_tokens, max(plan.capacity.max_num_seqs, 64)) + n_drafts,
        kv_dtype=plan.kv_dtype,
        n_threads=plan.n_threads,
    )
    try:
        return NativeRunner(plan.lowered, weights, plan.capacity, settings, plan.placement)
    except TiercelError:
        raise
    except MemoryError as error:
        raise OutOfPages(
            f"memory: the weights, {plan.capacity.n_pages} pages of KV and the arrays of {max_step_tokens} tokens "
            "a step do not fit what this process may have; "
            "lower max_num_seqs, max_num_batched_tokens or kv_cache_memory_bytes"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"threads: {plan.n_threads} could not be started ({error}); lower threads") from error


def speculation_settings(plan: Plan) -> "SpeculationSettings":
    """Return how tokens of this model are drafted.

    Raises: ConfigError: what was asked for is not there, or not for this model.
    """
    from tiercel.spec.settings import SpeculationSettings

    settings = SpeculationSettings.from_options(plan.options.speculative, plan.options.speculative_config)
    cannot = _why_no_drafts(plan)
    if cannot is None or settings.method is None:
        return settings
    if settings.is_asked:
        raise ConfigError(f"speculative: {settings.method} was asked for; {cannot}; leave it at auto, or off")
    return msgspec.structs.replace(settings, method=None)


def _why_no_drafts(plan: Plan) -> str | None:
    if plan.pooling is not None:
        return "a pooling model generates nothing"
    if plan.capacity.state_bytes:
        return "a model with recurrent state cannot go back behind a draft that was wrong"
    return None


def n_draft_rows(plan: Plan) -> int:
    """Return how many rows of a step may be drafts; the runner has room for so many more."""
    return speculation_settings(plan).n_rows_max(plan.capacity.max_num_seqs)


def _speculation(plan: Plan, vocab_size: int) -> "Speculation | None":
    settings = speculation_settings(plan)
    if settings.method is None:
        if plan.pooling is None and not settings.is_asked:
            import logging

            logging.getLogger(__name__).info("speculation: off, as %s", _why_no_drafts(plan))
        return None
    from tiercel.engine.speculation import Speculation

    return Speculation(settings.make_drafter(), settings, vocab_size=vocab_size)


def _tell_quantization(checkpoint: "Checkpoint") -> None:
    """Log how quantised matrices are stored and computed with."""
    found = checkpoint.quantization
    if found is not None:
        import logging

        logging.getLogger(__name__).info("weights: %s", "; ".join((found.describe(), *found.notes)))


def load_tokenizer(plan: Plan) -> "Tokenizer | None":
    """Load the tokenizer the options name, or the model's own; None if it has none or none is wanted.

    Raises: ModelFileError: its ids do not fit the model's vocabulary.
    """
    if plan.options.skip_tokenizer_init:
        return None
    if plan.options.tokenizer is not None:
        options = plan.options
        path = resolve(options.tokenizer, hf_token=options.hf_token, download_dir=options.download_dir).path
        with open_tokenizer_source(path) as source:
            tokenizer = _tokenizer_from(source, path, hashlib.sha256(str(path).encode()).hexdigest(), is_cached=False)
    else:
        tokenizer = _tokenizer_from(plan.checkpoint, plan.resolved.path, plan.checkpoint.digest(), is_cached=True)
    if tokenizer is not None and tokenizer.vocab_size > plan.info.vocab_size:
        raise ModelFileError(
            f"tokenizer: has {tokenizer.vocab_size} tokens; the model's vocabulary has {plan.info.vocab_size}; "
            "they are not of one model; give the right one with tokenizer="
        )
    return tokenizer


def open_tokenizer_source(path: Path) -> "contextlib.AbstractContextManager[Checkpoint | Path]":
    """Open where a tokenizer is to be read from: a folder as it is, a .gguf file as a checkpoint."""
    from tiercel.loaders.checkpoint import open_checkpoint

    return contextlib.nullcontext(path) if path.is_dir() else open_checkpoint(path)


def _tokenizer_from(source: "Checkpoint | Path", path: Path, digest: str, *, is_cached: bool) -> "Tokenizer | None":
    from tiercel.text.tokenizer import Tokenizer

    if isinstance(source, Path) or isinstance(source.tokenizer_source, Path):
        folder = source if isinstance(source, Path) else path
        return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    metadata = source.metadata

    def build() -> "Tokenizer | None":
        return Tokenizer.from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None

    if not is_cached:
        return build()
    from tiercel.text.compiled import cached

    return cached(build, default_folder().parent / "tokenizers", digest)


def build_engine(options: EngineOptions, *, on_plan: Callable[[Plan], None] | None = None) -> Engine:
    """Build and start an engine.

    `on_plan` hears of the plan before the weights are packed (to print the capacity line, say).

    Raises: ModelNotFound, ModelFileError, UnsupportedModel, ConfigError, OutOfPages: as the message says.
    """
    tiers = _read_tiers(options)
    resolved = _resolve(options)
    _tell_unread()
    start = _Start(options, resolved)
    # Imported while threads pack.
    from tiercel.engine.client import EngineClient
    from tiercel.engine.core import EngineCore

    plan = start.plan() or make_plan(options, resolved)
    try:
        _ = plan.generation_defaults  # a folder without any is told before weights are packed
        if on_plan is not None:
            on_plan(plan)
        # The native threads that pack do not hold the interpreter's lock, so both go on at once. What else there is to
        # do after a kept plan holds it: two threads would only pass it to and fro (9 ms).
        text = _at_once(plan) if start.is_used else _in_thread(lambda: _load_text(plan)).result
        runner = build_runner(plan, start.weights())
        try:
            tokenizer, conversations = text()
            core = EngineCore(
                runner,
                engine_config(plan),
                make_tiers=_make_tiers(plan, tiers, runner),
                speculation=_speculation(plan, runner.limits.vocab_size),
            )
            client = EngineClient(
                core,
                tokenizer,
                weights_digest=plan.identity,
                kv_dtype=plan.kv_dtype,
                eos_ids=eos_ids(plan, tokenizer),
                grammar_limits=_grammar_limits(options),
                reasoning=_reasoning_config(options),
                reasoning_texts=lambda: _reasoning_texts(tokenizer),
                pooler=None if plan.pooling is None else _pooler(plan, runner),
            )
            start.keep(plan, runner)
        except BaseException:
            runner.close()
            raise
    except BaseException:
        plan.checkpoint.close()
        raise
    core.start()
    return Engine(plan, runner, client, tokenizer, conversations)


def _read_tiers(options: EngineOptions) -> "tuple[TierSpec, ...]":
    if not options.kv_tiers:
        return ()
    from tiercel.kv.tiers.registry import read_tiers

    return read_tiers(list(options.kv_tiers))


def _make_tiers(plan: Plan, specs: "tuple[TierSpec, ...]", runner: "NativeRunner") -> "MakeTiers | None":
    """Return what makes the tiers, for pages of this very model.

    Raises: ConfigError: the model's pages are of no use to another request.
    """
    if not specs:
        return None
    from tiercel.kv.tiers.identity import TierIdentity
    from tiercel.kv.tiers.placed import place_tiers

    if plan.info.state_layers:
        raise ConfigError(
            f"kv_tiers: {plan.info.architecture} has layers with recurrent state, which no tier keeps yet, and pages "
            "without it are of no use after a restart; leave kv_tiers out"
        )
    group = runner.page_group
    if group is None or not plan.is_prefix_caching or runner.limits.needs_whole:
        raise ConfigError(
            f"kv_tiers: pages of {plan.info.architecture} are not used for other requests, or prefix caching is off; "
            "leave kv_tiers out"
        )
    size = plan.capacity.page_size_tokens
    state, about = runner.state_group, plan.resolved.display_name
    groups = (group,) if state is None else (group, state)
    identity = TierIdentity(plan.info.architecture, plan.identity, size, groups, about)
    return lambda wake, clock: place_tiers(specs, identity, wake, clock)


def _pooler(plan: Plan, runner: "NativeRunner") -> "Pooler":
    from tiercel.engine.pooling import Pooler

    assert plan.pooling is not None
    return Pooler(plan.pooling, runner.limits.row_width)


class _Start:
    """The kept plan of one start (`runner.ready`): looked for at once, believed only when it was verified."""

    def __init__(self, options: EngineOptions, resolved: ResolvedModel) -> None:
        self._options, self._resolved = options, resolved
        self._begun: Begun | None = None
        self.is_used = False
        self._place: Path | None = None
        # With a quantization, packing is not all there is to do. A folder is not kept (see `ready`).
        if options.quantization not in (None, "none") or resolved.path.suffix != ".gguf":
            return
        if options.runner == "pooling":  # which a kept plan does not know
            return
        from tiercel.runner import ready

        # Where a model came from decides nothing, and a key of the hub must not be written anywhere.
        source = {row.name for row in engine_rows("source")}
        source.add("kv_tiers")
        plain = {k: v for k, v in asdict(options).items() if k not in source} | {"isa": env.read(env.ISA)}
        path = resolved.path.absolute()
        try:
            self._key = ready.key_of(path, plain)
        except OSError:
            return
        self._place = ready.place_of(default_folder().parent / "plans", path, plain)
        self._n_threads = options.threads or machine.usable_cpus()
        self._begun = ready.begin(self._place, self._key, path, self._n_threads)

    def plan(self) -> Plan | None:
        """Return the kept plan, if there is one and it is of this very file; else stop packing."""
        begun, self._begun = self._begun, None
        if begun is None or not begun.is_same():
            return None
        from tiercel.runner.kept_plan import checkpoint_of, decided

        try:
            kept = decided(begun)
        except msgspec.MsgspecError:
            return None
        capacity = _capacity(self._options, kept.info)
        # Rotary tables may depend on the length, and the length on what memory is free.
        if capacity.max_len_tokens != kept.max_len_tokens:
            return None
        checkpoint = checkpoint_of(begun, kept, self._resolved.path)
        self._begun, self.is_used = begun, True
        return Plan(
            self._options,
            self._resolved,
            checkpoint,
            kept.info,
            kept.program,
            capacity,
            self._n_threads,
            kept.identity,
            kept.placement,
        )

    def weights(self) -> "ReadyWeights | None":
        """Wait for what was begun."""
        begun, self._begun = self._begun, None
        return None if begun is None else begun.join()

    def keep(self, plan: Plan, runner: "NativeRunner") -> None:
        """Keep the plan for the next start, unless it came from there."""
        if self.is_used or self._place is None:
            return
        from tiercel.runner import ready
        from tiercel.runner.kept_plan import Decided, kept_of
        from tiercel.runner.native import matrices_of

        checkpoint = plan.checkpoint
        kept = kept_of(
            self._key,
            checkpoint,
            Decided(
                checkpoint.config,
                checkpoint.generation_config,
                checkpoint.norm_weights_include_one,
                plan.info,
                plan.lowered,
                runner.placement,
                plan.capacity.max_len_tokens,
                plan.identity,
            ),
            matrices_of(plan.lowered),
            expand_to_f32=plan.is_float32_compute,
        )
        if kept is not None:
            ready.save(self._place, kept)


def log_plan(plan: Plan) -> None:
    """Log what fits, as `tiercel serve` prints it; an `on_plan` for engines inside somebody's program."""
    import logging

    logging.getLogger(__name__).info("%s", plan.capacity.describe())


def _grammar_limits(options: EngineOptions) -> "GrammarLimits | None":
    if not options.structured_outputs_config:
        return None
    from tiercel.sampling.grammar_limits import GrammarLimits

    return GrammarLimits.from_options(options.structured_outputs_config)


def _reasoning_config(options: EngineOptions) -> "ReasoningConfig | None":
    if not options.reasoning_config:
        return None
    from tiercel.text.thinking_budget import ReasoningConfig

    return ReasoningConfig.from_options(options.reasoning_config)


def _reasoning_texts(tokenizer: "Tokenizer | None") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find what opens and what closes a model's reasoning. A server that names a parser says it instead."""
    from tiercel.text.parsers.registry import choose_of

    return ((), ()) if tokenizer is None else choose_of(tokenizer).reasoning_texts


def engine_config(plan: Plan) -> "EngineConfig":
    """Return the engine's share of the options."""
    from tiercel.engine.config import EngineConfig

    options = plan.options
    config = EngineConfig(
        max_num_seqs=plan.capacity.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, plan.capacity.max_num_seqs),
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        stream_interval=options.stream_interval,
        enable_prefix_caching=plan.is_prefix_caching,
        scheduling_policy="priority" if options.scheduling_policy == "priority" else "fcfs",
        async_scheduling=options.async_scheduling,
        max_logprobs=options.max_logprobs,
        seed=options.seed,
        max_draft_rows=n_draft_rows(plan),
    )
    return config if options.max_waiting is None else msgspec.structs.replace(config, max_waiting=options.max_waiting)


def eos_ids(plan: Plan, tokenizer: "Tokenizer | None") -> frozenset[int]:
    """Return the ids that end a sequence: the generation config's, else the config's, and the tokenizer's.

    Ids beyond the vocabulary, which files of padded or cut models name, are left out: they can never come.
    """
    found: set[int] = set(tokenizer.eos_ids) if tokenizer is not None else set()
    stated = plan.checkpoint.generation_config.get("eos_token_id")
    if stated is None:
        stated = plan.checkpoint.config.get("eos_token_id")
    for one in stated if isinstance(stated, list) else [stated]:
        if isinstance(one, int) and not isinstance(one, bool):
            found.add(one)
    return frozenset(one for one in found if 0 <= one < plan.info.vocab_size)


def _load_text(plan: Plan) -> "tuple[Tokenizer | None, Conversations]":
    """Load all that has to do with text. A chat template is compiled by who first needs it."""
    from tiercel.text.conversation import Conversations

    tokenizer = load_tokenizer(plan)
    return tokenizer, Conversations(tokenizer)


def _at_once(plan: Plan) -> "Callable[[], tuple[Tokenizer | None, Conversations]]":
    text = _load_text(plan)
    return lambda: text


def _in_thread(work: "Callable[[], _T]") -> "Future[_T]":
    """Run `work` on a thread of its own; packing releases the GIL, so both run at once."""
    import threading
    from concurrent.futures import Future

    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 a thread's boundary: the caller gets it from result()
            done.set_exception(error)

    threading.Thread(target=run, name="tiercel-tokenizer", daemon=True).start()
    return done


def describe(model: str | None, *, program: bool = False, explain: bool = False) -> dict[str, object]:
    """Return what `tiercel show` prints: a summary, and on request the recorded program and the choice of each op's
    kernel.
    """
    plan = make_plan(EngineOptions(model=model))
    with plan.checkpoint:
        info = plan.info
        formats: dict[str, int] = {}
        for name, shape in plan.model.expected_weights().items():
            tensor_format = plan.checkpoint.tensors[name].format
            formats[str(tensor_format)] = formats.get(str(tensor_format), 0) + tensor_format.nbytes(_count(shape))
        summary = [
            ("architecture", info.architecture),
            ("vocabulary", f"{info.vocab_size:,}"),
            ("context", f"{info.max_len_tokens:,} tokens"),
            (
                "formats",
                ", ".join(
                    f"{name} {size / (1 << 20):.1f} MiB" for name, size in sorted(formats.items(), key=lambda f: -f[1])
                ),
            ),
            *([("stored as", stored.describe())] if (stored := plan.checkpoint.quantization) is not None else []),
            ("here", plan.capacity.describe()),
            ("threads", plan.n_threads),
            ("identity", plan.identity),
        ]
        found: dict[str, object] = {"summary": summary, "sizes": _sizes(plan)}
        if program:
            found["program"] = f"{plan.program.text()}\n{plan.lowered.text()}"
        if explain:
            from tiercel.runner.explain import explain_program

            found["explain"] = explain_program(plan.lowered, is_float32_compute=plan.is_float32_compute)
        return found


def _sizes(plan: Plan) -> "ModelSizes":
    """Return the model's arithmetic, with bytes as the checkpoint has them."""
    from tiercel.runner.sizes import sizes_of

    tensors = plan.checkpoint.tensors
    matrix_names = [name for name, shape in plan.model.expected_weights().items() if len(shape) == 2]
    floats = {tensors[name].format for name in matrix_names} & {Format.F32, Format.F16, Format.BF16}

    def n_bytes_of(name: str, weight: "Weight") -> int:
        tensor, count = tensors[name], _count(weight.shape)
        if tensor.matrix is not None:
            return tensor.matrix.n_bytes * count // _count(tensor.shape)
        return tensor.format.nbytes(count)

    stored = min((f.nbytes(1) for f in floats), default=Format.F32.nbytes(1))
    return sizes_of(plan.program, plan.info, n_bytes_of, stored_float_bytes=stored)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
