"""vLLM's options that are no options here: those that are gone, and those without a meaning, with what to do instead.

Every door asks here before it says "unknown": the command line, `--config` files, Python keywords, the environment. An
option without a meaning is taken with the values that change nothing, so that scripts keep running, and refused with
its reason with any other. Read only when a name is not known: a start pays nothing for it.
"""

from dataclasses import dataclass
from typing import Any, Final

from tiercel.base.errors import UnknownOption


@dataclass(frozen=True, slots=True)
class Removed:
    """An option that vLLM had: the version of vLLM without it ("": an early one), and what to do instead."""

    since: str
    hint: str
    is_switch: bool = False

    def __str__(self) -> str:
        return f"removed (vLLM {self.since}): {self.hint}" if self.since else f"removed: {self.hint}"


@dataclass(frozen=True, slots=True)
class Absent:
    """An option of vLLM's that would change nothing here, or that is not there: the values that are taken, and why no
    other is.
    """

    same: tuple[Any, ...]
    why: str
    is_switch: bool = False


_RECOMPUTED: Final = "a preempted request is recomputed, mostly from the prefix cache; leave it out"
_CONSTRAINED: Final = "the grammar library is chosen by itself; leave it out"

# Removed from vLLM, or on their way out there.
REMOVED: Final[dict[str, Removed]] = {
    "calculate_kv_scales": Removed(
        "0.28",
        "scales of keys and values come from the checkpoint or are 1.0; calibrate with llm-compressor",
        is_switch=True,
    ),
    "override_attention_dtype": Removed("0.28", "use dtype, or compute_dtype"),
    "best_of": Removed("", "ask for n answers and choose among them"),
    "block_manager": Removed("", "there is one page pool; leave it out"),
    "device": Removed("", "the backend follows from the machine; leave it out"),
    "disable_log_requests": Removed("", "requests are not logged unless asked for; leave it out", is_switch=True),
    "enable_reasoning": Removed("", "reasoning is found by itself; reasoning_parser overrides it", is_switch=True),
    "guided_decoding_backend": Removed("", _CONSTRAINED),
    "guided_decoding_disable_any_whitespace": Removed("", _CONSTRAINED, is_switch=True),
    "max_seq_len_to_capture": Removed("", "nothing is captured; leave it out"),
    "multi_step_stream_outputs": Removed("", "use stream_interval"),
    "num_lookahead_slots": Removed("", "the engine plans ahead by itself; leave it out"),
    "num_scheduler_steps": Removed("", "the engine plans ahead by itself; leave it out"),
    "preemption_mode": Removed("", _RECOMPUTED),
    "rope_scaling": Removed("", "it stands in the model's config.json"),
    "rope_theta": Removed("", "it stands in the model's config.json"),
    "scheduler_delay_factor": Removed("", "requests are computed as they come; leave it out"),
    "swap_space": Removed("", _RECOMPUTED),
    "task": Removed("", "what a model can do follows from its files; leave it out"),
    "use_v2_block_manager": Removed("", "there is one page pool; leave it out", is_switch=True),
}

# Variables of the environment that vLLM no longer knows, and what to do instead.
REMOVED_VARIABLES: Final[dict[str, Removed]] = {
    "VLLM_ATTENTION_BACKEND": Removed("", "kernels are chosen by the processor; unset it (TIERCEL_ISA forces a level)"),
    "VLLM_USE_V1": Removed("", "there is one engine; unset it"),
}

_PROCESS: Final = "one process uses all the processors it may, and there is no second one to share the model with"
_GPU: Final = "for GPUs, and this engine computes on the CPU"
_PROGRAM: Final = "a model is one recorded program, which always runs as it is"
_LORA: Final = "adapters (LoRA) are not there yet"
_MEDIA: Final = "pictures, sound and video are not there yet"
_EXPERTS: Final = "mixture-of-experts models are not there yet"
_SPECULATION: Final = "speculative_config says what drafts, with which model and how many tokens"
_TIERS: Final = "kv_tiers names the tiers of cached keys and values"
_POOLING: Final = "how a model pools follows from its files"
_STATE: Final = (
    "recurrent states are float32, with one form of kernel, and kept by the pages' keys where it is worth it"
)
_LOADING: Final = "how a model is read follows from its files"
_CODE: Final = "refused: no code of a model repository or of a plugin is run"
_STATS: Final = "these metrics are not there"

# Name -> (values that are taken and change nothing, whether it is a switch), by the reason why no other is.
_ROWS: Final[dict[str, dict[str, tuple[tuple[Any, ...], bool]]]] = {
    _PROCESS: {
        "tensor_parallel_size": ((1,), False),
        "pipeline_parallel_size": ((1,), False),
        "data_parallel_size": ((1,), False),
        "data_parallel_size_local": ((1,), False),
        "data_parallel_rank": ((0,), False),
        "data_parallel_start_rank": ((0,), False),
        "data_parallel_address": ((), False),
        "data_parallel_rpc_port": ((), False),
        "data_parallel_backend": (("mp",), False),
        "data_parallel_hybrid_lb": ((False,), True),
        "data_parallel_external_lb": ((False,), True),
        "data_parallel_multi_port_external_lb": ((False,), True),
        "data_parallel_supervisor_port": ((9256,), False),
        "decode_context_parallel_size": ((1,), False),
        "prefill_context_parallel_size": ((1,), False),
        "distributed_executor_backend": (("mp", "uni"), False),
        "distributed_timeout_seconds": ((), False),
        "nnodes": ((1,), False),
        "node_rank": ((0,), False),
        "master_addr": (("127.0.0.1",), False),
        "master_port": ((29501,), False),
        "api_server_count": ((1,), False),
        "headless": ((False,), True),
        "max_parallel_loading_workers": ((), False),
        "numa_bind": ((False,), True),
        "worker_cls": (("auto",), False),
        "worker_extension_cls": (("",), False),
        "renderer_num_workers": ((1,), False),
        "disable_custom_all_reduce": ((False, True), True),
        "enable_fault_tolerance": ((False,), True),
        "fault_tolerance_config": (({},), False),
        "cpu_distributed_timeout_seconds": ((), False),
        "dcp_comm_backend": (("ag_rs",), False),
        "dcp_kv_cache_interleave_size": ((1,), False),
        "cp_kv_cache_interleave_size": ((1,), False),
        "disable_nccl_for_dp_synchronization": ((False, True), True),
        "dp_supervisor_probe_interval_s": ((5,), False),
        "dp_supervisor_probe_timeout_s": ((5,), False),
        "dp_supervisor_probe_failure_threshold": ((3,), False),
        "numa_bind_cpus": ((), False),
        "numa_bind_nodes": ((), False),
        "ray_workers_use_nsight": ((False,), True),
    },
    _GPU: {
        "enable_dbo": ((False,), True),
        "enable_sleep_mode": ((False,), True),
        "device_ids": ((), False),
        "num_gpu_blocks_override": ((), False),
        "cpu_offload_params": ((), False),
        "offload_backend": (("auto",), False),
        "offload_params": ((), False),
        "moe_backend": (("auto",), False),
        "linear_backend": (("auto",), False),
        "cudagraph_capture_sizes": ((), False),
        "max_cudagraph_capture_size": ((), False),
        "cudagraph_metrics": ((False,), True),
        "enable_flashinfer_autotune": ((False,), True),
        "enable_bf16x3_router_gemm": ((False,), True),
        "enable_cumem_allocator": ((False,), True),
        "ubatch_size": ((0,), False),
        "dbo_decode_token_threshold": ((32,), False),
        "dbo_prefill_token_threshold": ((512,), False),
        "offload_group_size": ((0,), False),
        "offload_num_in_group": ((1,), False),
        "offload_prefetch_step": ((1,), False),
        "jit_monitor_mode": (("warn",), False),
        "jit_monitor_verbose": ((False,), True),
        "ir_op_priority": (({},), False),
    },
    f"{_GPU}; set kv_cache_memory_bytes": {"gpu_memory_utilization": ((0.9, 0.92), False)},
    "weights are in host memory already": {"cpu_offload_gb": ((0,), False)},
    _PROGRAM: {
        "enforce_eager": ((False, True), True),
        "compilation_config": (({},), False),
        "optimization_level": ((2, "O2"), False),
        "performance_mode": (("balanced",), False),
        "attention_backend": (("auto",), False),
        "attention_config": (({},), False),
        "kernel_config": (({},), False),
        "disable_cascade_attn": ((False, True), True),
        "disable_sliding_window": ((False,), True),
        "model_impl": (("auto", "vllm"), False),
        "hf_overrides": (({},), False),
        "hf_config_path": ((), False),
        "config_format": (("auto", "hf"), False),
        "model_class_overrides": (({},), False),
        "kv_cache_dtype_skip_layers": (([],), False),
        "kv_sharing_fast_prefill": ((False,), True),
        "prefix_match_unit": ((), False),
        "use_fp64_gumbel": ((False,), True),
        "return_sampling_mask": ((False,), True),
    },
    _LORA: {
        "enable_lora": ((False,), True),
        "lora_modules": ((), False),
        "max_loras": ((1,), False),
        "max_lora_rank": ((16,), False),
        "max_cpu_loras": ((), False),
        "lora_dtype": (("auto",), False),
        "fully_sharded_loras": ((False,), True),
        "lora_target_modules": ((), False),
        "default_mm_loras": ((), False),
        "enable_tower_connector_lora": ((False,), True),
        "specialize_active_lora": ((False,), True),
        "enable_mixed_moe_lora_format": ((False,), True),
        "enable_moe_shared_loras": ((False,), True),
    },
    _MEDIA: {
        "allowed_local_media_path": (("",), False),
        "allowed_media_domains": ((), False),
        "limit_mm_per_prompt": (({},), False),
        "enable_mm_embeds": ((False,), True),
        "enable_prompt_embeds": ((False,), True),
        "media_io_kwargs": (({},), False),
        "mm_processor_kwargs": (({},), False),
        "mm_processor_cache_gb": ((0, 4), False),
        "mm_encoder_tp_mode": (("weights",), False),
        "interleave_mm_strings": ((False,), True),
        "skip_mm_profiling": ((False, True), True),
        "language_model_only": ((False, True), True),
        "ec_transfer_config": ((), False),
        "enable_mm_processor_stats": ((False,), True),
        "ec_manager_config": (({},), False),
        "disable_chunked_mm_input": ((False, True), True),
        "mm_processor_cache_type": (("lru",), False),
        "mm_processor_device": (("auto", "cpu"), False),
        "mm_hasher_algorithm": (("blake3",), False),
        "mm_shm_cache_max_object_size_mb": ((128,), False),
        "mm_encoder_only": ((False,), True),
        "mm_encoder_attn_backend": ((), False),
        "mm_encoder_attn_dtype": ((), False),
        "mm_encoder_fp8_scale_path": ((), False),
        "mm_encoder_fp8_scale_save_path": ((), False),
        "mm_encoder_fp8_scale_save_margin": ((1.5,), False),
        "mm_tensor_ipc": (("direct_rpc",), False),
        "mm_ipc_gpu_memory_gb": ((0,), False),
        "mm_device_do_normalize": ((False,), True),
        "video_pruning_rate": ((), False),
        "video_pruning_method": (("evs",), False),
    },
    _EXPERTS: {
        "enable_expert_parallel": ((False,), True),
        "enable_eplb": ((False,), True),
        "eplb_config": (({},), False),
        "all2all_backend": ((), False),
        "expert_placement_strategy": (("linear",), False),
        "enable_elastic_ep": ((False,), True),
        "enable_return_routed_experts": ((False,), True),
        "enable_ep_weight_filter": ((False,), True),
    },
    _SPECULATION: {
        "spec_method": ((), False),
        "spec_model": ((), False),
        "spec_tokens": ((0,), False),
        "diffusion_config": ((), False),
    },
    _TIERS: {
        "kv_offloading_backend": (("native",), False),
        "kv_transfer_config": ((), False),
        "kv_events_config": ((), False),
        "weight_transfer_config": ((), False),
    },
    _POOLING: {
        "convert": (("auto", "none"), False),
        "pooler_config": (({},), False),
        "enable_flash_late_interaction": ((False, True), True),
    },
    _STATE: {
        "mamba_cache_dtype": (("auto",), False),
        "mamba_ssm_cache_dtype": (("auto",), False),
        "mamba_block_size": ((), False),
        "mamba_cache_mode": (("align",), False),
        "mamba_backend": (("triton",), False),
        "mamba_ssu_algorithm": (("auto",), False),
        "enable_mamba_cache_stochastic_rounding": ((False,), True),
        "mamba_cache_philox_rounds": ((0,), False),
        "replayssm_buffer_len": ((16,), False),
        "use_replayssm": ((False,), True),
        "gdn_prefill_backend": (("auto",), False),
        "kda_prefill_backend": (("auto",), False),
    },
    _LOADING: {
        "load_format": (("auto",), False),
        "tokenizer_mode": (("auto", "hf"), False),
        "ignore_patterns": (("original/**/*",), False),
        "model_loader_extra_config": (({},), False),
        "safetensors_load_strategy": (("lazy",), False),
        "safetensors_prefetch_num_threads": ((8,), False),
        "safetensors_prefetch_block_size": ((16777216,), False),
        "use_tqdm_on_load": ((True, False), True),
        "pt_load_map_location": (("cpu",), False),
        "quantization_config": ((), False),
        "allow_deprecated_quantization": ((False,), True),
    },
    _CODE: {
        "trust_remote_code": ((False,), True),
        "code_revision": ((), False),
        "logits_processors": (([],), False),
        "scheduler_cls": ((), False),
        "io_processor_plugin": ((), False),
        "tool_parser_plugin": (("",), False),
        "reasoning_parser_plugin": (("",), False),
    },
    "it is found in the template": {"chat_template_content_format": (("auto",), False)},
    "tool calls are always found by themselves; send tool_choice none where they are not wanted": {
        "enable_auto_tool_choice": ((True, False), True)
    },
    "/docs fetches nothing from elsewhere anyway": {"enable_offline_docs": ((True, False), True)},
    "the id is always in the answer's head": {"enable_request_id_headers": ((True, False), True)},
    "what came from the cache is always told": {"enable_prompt_tokens_details": ((True, False), True)},
    "/load always tells it": {"enable_server_load_tracking": ((True, False), True)},
    "prompts are always computed in chunks": {"enable_chunked_prefill": ((True,), True)},
    "several prompts are always computed side by side": {
        "max_num_partial_prefills": ((1,), False),
        "max_long_partial_prefills": ((1,), False),
    },
    "keys of pages are always SHA-256": {"prefix_caching_hash_algo": (("sha256",), False)},
    "they are always those of the model, before any setting of a request": {
        "logprobs_mode": (("raw_logprobs",), False)
    },
    "the tokenizer of a hub model is taken at the model's own revision": {"tokenizer_revision": ((), False)},
    "gRPC is not there": {"grpc": ((False,), True), "tokens_only": ((False,), True)},
    "a plan is made as soon as there is room": {
        "scheduler_reserve_full_isl": ((True,), True),
        "watermark": ((0.0,), False),
        "prefill_schedule_interval": ((1,), False),
        "max_num_scheduled_tokens": ((), False),
        "disable_hybrid_kv_cache_manager": ((False, True), True),
    },
    _STATS: {
        "collect_detailed_traces": ((), False),
        "kv_cache_metrics": ((False,), True),
        "kv_cache_metrics_sample": ((0.01,), False),
        "enable_mfu_metrics": ((False,), True),
        "show_hidden_metrics_for_version": ((), False),
        "enable_layerwise_nvtx_tracing": ((False,), True),
        "enable_logging_iteration_details": ((False,), True),
        "aggregate_engine_logging": ((False,), True),
        "profiler_config": (({},), False),
    },
    "there is nothing it would be handed on to": {"additional_config": (({},), False), "tool_server": ((), False)},
    "routes of Cohere's are not there": {
        "cohere_is_reasoning_model": ((True, False), True),
        "cohere_format": (("cmd4",), False),
    },
    "unknown variables of the environment are told in the log": {"fail_on_environ_validation": ((False,), True)},
    "a traceback of what failed is always in the log": {"log_error_stack": ((True, False), True)},
}

ABSENT: Final[dict[str, Absent]] = {
    name: Absent(same, why, is_switch) for why, rows in _ROWS.items() for name, (same, is_switch) in rows.items()
}

# Short flags of options without a meaning here, by the names vLLM gives them.
SHORT: Final[dict[str, str]] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-n": "nnodes",
    "-r": "node_rank",
    "-O": "optimization_level",
}


def is_listed(name: str) -> bool:
    """Whether `name`, with underscores, is an option of vLLM's that is none here."""
    return name in REMOVED or name in ABSENT


def is_switch(name: str) -> bool:
    """Whether the flag of a listed option takes no value."""
    return REMOVED[name].is_switch if name in REMOVED else ABSENT[name].is_switch


def why_not(name: str, value: Any) -> str | None:
    """Say why a listed option cannot have `value`, a Python value or its text; None: it changes nothing."""
    if name in REMOVED:
        return str(REMOVED[name])
    row = ABSENT[name]
    if value is None or any(_is_same(value, one) for one in row.same):
        return None
    return f"{described(name)} (got {_text(value)[:60]})" if row.same else described(name)


def described(name: str) -> str:
    """Say why a listed option is none here, and which values are taken all the same."""
    if name in REMOVED:
        return str(REMOVED[name])
    row = ABSENT[name]
    taken = " or ".join(_text(one) for one in row.same)
    return f"{row.why}; only {taken} is taken, as it changes nothing" if row.same else f"{row.why}; leave it out"


def refuse(name: str, value: Any) -> None:
    """Let a listed option pass with a value that changes nothing.

    Raises: UnknownOption: it has any other; the message says why it is none here.
    """
    why = why_not(name, value)
    if why is not None:
        raise UnknownOption(f"option {name}: {why}")


def _is_same(value: Any, one: Any) -> bool:
    if isinstance(value, str):
        return value in (one, _text(one)) or (not isinstance(one, bool | str) and _as_number(value) == one)
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(value: Any) -> str:
    if value == "":
        return "an empty text"
    return str(value).lower() if isinstance(value, bool) else str(value)
