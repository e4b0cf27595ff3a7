"""A plan's runner: the weights packed, the program on the core."""

from typing import TYPE_CHECKING

from tiercel.base.errors import ConfigError, OutOfPages, TiercelError
from tiercel.boot.drafter import drafting_of
from tiercel.boot.plan import Plan
from tiercel.boot.speculation import n_draft_rows, speculation_settings

if TYPE_CHECKING:
    from tiercel.loaders.checkpoint import Checkpoint
    from tiercel.runner.native import NativeRunner
    from tiercel.runner.ready import ReadyWeights


def build_runner(plan: Plan, ready: "ReadyWeights | None" = None) -> "NativeRunner":
    """Pack the weights, but those that are `ready`, and start the native runner.

    Raises: OutOfPages: there is not the memory; ConfigError: there are not the threads.
    """
    from tiercel.runner.native import NativeRunner, NativeSettings
    from tiercel.runner.weights import PackedWeightStore

    _tell_quantization(plan.checkpoint)
    tensors = plan.checkpoint.tensors
    weights = PackedWeightStore(
        tensors if plan.drafter is None else tensors.with_others(plan.drafter.checkpoint.tensors),
        expand_to_f32=plan.is_float32_compute,
        n_threads=plan.n_threads,
        releases=True,
        ready=ready,
    )
    max_step_tokens = max(plan.options.max_num_batched_tokens, plan.capacity.max_num_seqs)
    n_drafts, speculated = n_draft_rows(plan), speculation_settings(plan)
    settings = NativeSettings(
        max_step_tokens=max_step_tokens + n_drafts,
        max_logits_rows=max_step_tokens
        if plan.pooling is not None
        else min(max_step_tokens, max(plan.capacity.max_num_seqs, 64)) + n_drafts,
        kv_dtype=plan.kv_dtype,
        n_threads=plan.n_threads,
        max_draft_rows=n_drafts,
        verification=speculated.verification,
    )
    try:
        drafting = None if plan.drafter is None else drafting_of(plan.drafter, speculated)
        return NativeRunner(plan.lowered, weights, plan.capacity, settings, plan.placement, drafting)
    except TiercelError:
        raise
    except MemoryError as error:
        drafts = f" and {n_drafts} more rows of drafts" if n_drafts else ""
        less = ", or give speculative=off" if n_drafts else ""
        raise OutOfPages(
            f"memory: the weights, {plan.capacity.n_pages} pages of KV and the arrays of {max_step_tokens} tokens "
            f"a step{drafts} do not fit what this process may have; "
            f"lower max_num_seqs, max_num_batched_tokens or kv_cache_memory_bytes{less}"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"threads: {plan.n_threads} could not be started ({error}); lower threads") from error


def _tell_quantization(checkpoint: "Checkpoint") -> None:
    """Log how quantised matrices are stored and computed with."""
    found = checkpoint.quantization
    if found is not None:
        import logging

        logging.getLogger(__name__).info("weights: %s", "; ".join((found.describe(), *found.notes)))
