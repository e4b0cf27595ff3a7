"""From a person's options to what is decided before weights are touched: the files, the recorded program, the pool."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.base import machine
from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.base.units import GIB
from tiercel.boot.drafter import PlannedDrafter, drafting_bytes_of, kind_of, n_draft_of, open_drafter_for
from tiercel.hub.resolve import ResolvedModel, resolve
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    from tiercel.loaders.checkpoint import Checkpoint
    from tiercel.loaders.sentence_files import SentenceFiles
    from tiercel.models.drafters.checkpoint import DraftCheckpoint
    from tiercel.models.info import ModelInfo
    from tiercel.models.model import Model
    from tiercel.models.pooling import PoolingSpec
    from tiercel.ops.lowered import Lowered
    from tiercel.ops.place import Placement
    from tiercel.ops.program import Program
    from tiercel.runner import capacity as sizing
    from tiercel.spec.settings import SpeculationSettings

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
    drafter: "PlannedDrafter | None" = None  # a model that drafts in this one's steps

    def close(self) -> None:
        """Release the files."""
        self.checkpoint.close()
        if self.drafter is not None:
            self.drafter.checkpoint.close()

    @property
    def model(self) -> "Model":
        """The model, built of the checkpoint's config."""
        return _model_of(self.options.runner, self.checkpoint)[0]

    @property
    def program(self) -> "Program":
        """The program as it is recorded; `lowered` is made of it."""
        return _record(self.options, self.checkpoint, self.model, self.capacity.max_len_tokens, self.drafter)

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


def resolve_model(options: EngineOptions) -> ResolvedModel:
    """Find the model that the options name."""
    return resolve(
        options.model, revision=options.revision, hf_token=options.hf_token, download_dir=options.download_dir
    )


def make_plan(options: EngineOptions, resolved: ResolvedModel | None = None, *, promised_bytes: int = 0) -> Plan:
    """Find and read the model and size everything; no weight is read but for the digest.

    `promised_bytes` are another plan's, and not free although nothing has taken them yet.
    """
    from tiercel.loaders.checkpoint import open_checkpoint

    resolved = resolved or resolve_model(options)
    checkpoint = open_checkpoint(resolved.path)
    try:
        return _plan_checkpoint(options, resolved, checkpoint, promised_bytes)
    except BaseException:
        checkpoint.close()
        raise


def _plan_checkpoint(
    options: EngineOptions, resolved: ResolvedModel, checkpoint: "Checkpoint", promised_bytes: int
) -> Plan:
    from tiercel.models.weights import check_weights
    from tiercel.ops.passes import lower_and_fuse

    model, files = _model_of(options.runner, checkpoint)
    if model.pooling is not None:
        checkpoint = checkpoint.with_prefix("model.", model.expected_weights())
    checkpoint = checkpoint.fitted(model.expected_weights(), model.other_shapes)
    check_weights(model, checkpoint.tensors)
    _check_dtype(options.dtype, checkpoint, model.expected_weights())
    info, pooling = _pooling_of(model, files)
    opened = open_drafter_for(options, settings_of(options), model, checkpoint)
    try:
        if opened is not None:
            info = opened.model.extended(info)
        capacity = capacity_of(options, info, opened, generates=pooling is None, promised_bytes=promised_bytes)
        drafter = None if opened is None else _plan_drafter(options, opened, checkpoint, model, capacity.max_len_tokens)
        program = _record(options, checkpoint, model, capacity.max_len_tokens, drafter)
        # The text holds the config, the formats and the rotary tables: all arithmetic but the weights' values.
        decided = f"{checkpoint.digest()}\n{options.compute_dtype}\n{program.text()}"
        if drafter is not None:  # whose keys and values are in the pages
            decided += f"\n{drafter.checkpoint.digest}\n{drafter.text}"
        identity = hashlib.sha256(decided.encode()).hexdigest()
        n_threads = options.threads or machine.usable_cpus()
        lowered = lower_and_fuse(program)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    return Plan(
        options, resolved, checkpoint, info, lowered, capacity, n_threads, identity, pooling=pooling, drafter=drafter
    )


def settings_of(options: EngineOptions) -> "SpeculationSettings":
    """Return what a person says about speculation.

    Raises: ConfigError: an option is unknown or out of its range.
    """
    from tiercel.spec.settings import SpeculationSettings

    return SpeculationSettings.from_options(options.speculative, _with_method(options))


def _with_method(options: EngineOptions) -> Mapping[str, Any]:
    """Name the kind of a drafter that is named by its folder only, as vLLM does: by its config."""
    config = options.speculative_config
    if "model" not in config or "method" in config or not isinstance(config["model"], str):
        return config
    return {**config, "method": kind_of(options, config["model"])}


def _plan_drafter(
    options: EngineOptions, opened: "DraftCheckpoint", checkpoint: "Checkpoint", model: "Model", max_len_tokens: int
) -> "PlannedDrafter":
    from tiercel.ops.passes import lower_and_fuse
    from tiercel.ops.recorder import ComputeDtype

    drafter = opened.model
    shared = {name: checkpoint.tensors[name].shape for name in drafter.shared_weights()}
    tensors: dict[str, Any] = {**planned_tensors(checkpoint, shared, options.quantization), **opened.planned()}
    programs = [
        drafter.record_draft(
            tensors,
            first=model.info.next_layer,
            module=module,
            compute_dtype=ComputeDtype.FLOAT32 if options.compute_dtype == "float32" else ComputeDtype.AUTO,
            max_len_tokens=max_len_tokens,
            norm_weights_include_one=checkpoint.norm_weights_include_one,
        )
        for module in range(drafter.n_modules)
    ]
    lowered = tuple(lower_and_fuse(program) for program in programs)
    text = "\n".join(program.text() for program in programs)
    n_draft = n_draft_of(settings_of(options), drafter)
    return PlannedDrafter(opened, lowered, n_draft, text, model.info.vocab_size)


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


def capacity_of(
    options: EngineOptions,
    info: "ModelInfo",
    opened: "DraftCheckpoint | None" = None,
    *,
    generates: bool = True,
    promised_bytes: int = 0,
) -> "sizing.Capacity":
    """Size the pool, beside what drafting takes and what is promised to another; `opened`: a drafter in the steps.

    Raises: ConfigError, OutOfPages: as the message says.
    """
    from tiercel.runner import capacity as sizing

    if _kv_dtype(options) not in info.kv_dtypes:
        raise ConfigError(
            f"kv_cache_dtype: got {options.kv_cache_dtype}; {info.architecture} keeps latent rows, which are keys and "
            f"values at once and have no such form; use auto, {' or '.join(info.kv_dtypes)}"
        )
    available = max(machine.available_bytes() - promised_bytes, 0)
    usual = min(_MAX_NUM_SEQS, options.max_num_batched_tokens)
    n_slots = options.max_num_seqs or sizing.slots_for(info.state_bytes, usual, available)
    settings = settings_of(options)
    capacity = sizing.plan(
        kv_token_bytes=info.kv_bytes_per_token(_kv_dtype(options)),
        page_size_tokens=options.block_size,
        model_len_tokens=info.max_len_tokens,
        max_model_len=options.max_model_len,
        max_num_seqs=n_slots,
        pool_bytes=options.kv_cache_memory_bytes,
        available_bytes=available,
        state_bytes=info.state_bytes,
        keeps_states=options.enable_prefix_caching is not False,
        beside=sizing.Beside(
            offloading_bytes=int((options.kv_offloading_size or 0) * GIB),
            drafting_bytes=drafting_bytes_of(options, settings, info, n_slots, opened) if generates else 0,
            is_drafting_asked=settings.is_asked,
        ),
    )
    if options.enable_prefix_caching and info.state_bytes and not capacity.n_snapshots:
        raise OutOfPages(
            f"enable_prefix_caching: {info.architecture} needs room for a recurrent state of "
            f"{info.state_bytes / (1 << 20):,.2f} MiB, and pages leave none; raise kv_cache_memory_bytes, lower "
            "max_model_len or leave the option out"
        )
    return capacity


def _record(
    options: EngineOptions,
    checkpoint: "Checkpoint",
    model: "Model",
    max_len_tokens: int,
    drafter: "PlannedDrafter | None" = None,
) -> "Program":
    from tiercel.ops.recorder import ComputeDtype

    tensors: dict[str, Any] = {**planned_tensors(checkpoint, model.expected_weights(), options.quantization)}
    if drafter is not None:
        tensors |= drafter.checkpoint.planned()
    return model.record(
        tensors,
        drafter=None if drafter is None else drafter.checkpoint.model,
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
