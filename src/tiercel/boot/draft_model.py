"""A second, smaller model that drafts: from what is said of it in `speculative_config` to a drafter."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tiercel.base.errors import ConfigError, DownloadError, ModelFileError, ModelNotFound, OutOfPages, UnsupportedModel
from tiercel.base.units import MIB
from tiercel.boot.plan import Plan, make_plan
from tiercel.boot.runner import build_runner
from tiercel.boot.speculation import speculation_settings
from tiercel.boot.text import load_tokenizer

if TYPE_CHECKING:
    from tiercel.spec.drafters.draft_model import DraftModelDrafter
    from tiercel.spec.vocabulary_map import VocabularyMap
    from tiercel.text.tokenizer import Tokenizer

# What it reads between two steps at most. More, and running streams would wait for a prompt that comes beside them.
_READS_TOKENS = 256
_N_SHARED_MIN = 100


def plan_draft_model(plan: Plan) -> Plan | None:
    """Plan the draft model that the options name; None: they name none.

    Raises: ConfigError: there is none, or none that can draft for this target. OutOfPages: it does not fit.
    """
    settings = speculation_settings(plan)
    if settings.method != "draft_model":
        return None
    n_seqs, n_tokens = plan.capacity.max_num_seqs, plan.capacity.max_len_tokens
    options = replace(
        plan.options,
        **{"revision": None, "quantization": None, "kv_cache_memory_bytes": None, **settings.model_options},
        model=settings.model,
        runner="generate",
        tokenizer=None,
        dtype="auto",
        kv_cache_dtype="auto",
        kv_offloading_size=None,
        kv_tiers=(),
        max_model_len=None,
        max_num_seqs=n_seqs,
        max_num_batched_tokens=max(_READS_TOKENS, n_seqs),
        enable_prefix_caching=False,
        speculative="off",
        speculative_config={},
    )
    where = f"speculative_config.model: {settings.model}"
    try:
        draft = make_plan(options, promised_bytes=plan.capacity.nbytes)
    except (ConfigError, DownloadError, ModelNotFound, ModelFileError, UnsupportedModel) as error:
        raise ConfigError(f"{where}: {error}") from error
    except OutOfPages as error:
        raise _out_of_pages(where, plan, error) from error
    try:
        _check(where, draft, n_tokens)
    except BaseException:
        draft.checkpoint.close()
        raise
    return draft


def _out_of_pages(where: str, plan: Plan, error: OutOfPages) -> OutOfPages:
    """Say whose memory is short. One size is the draft model's own; the others are its target's."""
    text = str(error).replace("kv_cache_memory_bytes", "speculative_config.kv_cache_memory_bytes")
    return OutOfPages(f"{where}, beside the target's {plan.capacity.nbytes / MIB:,.0f} MiB: {text}")


def _check(where: str, draft: Plan, n_tokens: int) -> None:
    if draft.capacity.state_bytes:
        raise ConfigError(
            f"{where}: {draft.info.architecture} has recurrent state, which cannot go back behind drafts that were "
            "wrong; choose a model without"
        )
    if draft.info.max_len_tokens < n_tokens:
        raise ConfigError(
            f"{where}: its context is {draft.info.max_len_tokens:,} tokens; the target's is {n_tokens:,}; as many are "
            "needed; lower max_model_len or choose another draft model"
        )
    if draft.capacity.max_len_tokens < n_tokens:
        raise ConfigError(
            f"{where}: its pages hold {draft.capacity.max_len_tokens:,} tokens; one sequence may have {n_tokens:,}; "
            "raise speculative_config.kv_cache_memory_bytes or lower max_model_len"
        )


def make_draft_model(plan: Plan, draft: Plan, tokenizer: "Tokenizer | None") -> "DraftModelDrafter":
    """Build the draft model's runner. `tokenizer`: the target's.

    Raises: ConfigError: the vocabularies have too little in common. OutOfPages: there is not the memory.
    """
    from tiercel.spec.drafters.draft_model import DraftModelDrafter

    vocabulary = _vocabulary(plan, draft, tokenizer)
    try:
        runner = build_runner(draft)
    except OutOfPages as error:
        raise _out_of_pages(f"speculative_config.model: {draft.options.model}", plan, error) from error
    return DraftModelDrafter(
        runner, target_vocab_size=plan.info.vocab_size, vocabulary=vocabulary, on_close=draft.checkpoint.close
    )


def _vocabulary(plan: Plan, draft: Plan, tokenizer: "Tokenizer | None") -> "VocabularyMap | None":
    """Return how the two vocabularies go together; None: ids mean the same in both."""
    where = f"speculative_config.model: {draft.resolved.display_name}"
    own = None if tokenizer is None else load_tokenizer(draft)
    sizes = plan.info.vocab_size, draft.info.vocab_size
    if tokenizer is None or own is None:
        if sizes[0] == sizes[1]:
            return None
        raise ConfigError(
            f"{where}: its vocabulary has {sizes[1]:,} tokens and the target's {sizes[0]:,}, and without both "
            "tokenizers they cannot be mapped; leave out skip_tokenizer_init, or choose another draft model"
        )
    target_bytes, draft_bytes = (
        [one.token_bytes(i) for i in range(size)] for one, size in zip((tokenizer, own), sizes, strict=True)
    )
    n = min(sizes)
    if target_bytes[:n] == draft_bytes[:n] and not any(target_bytes[n:]) and not any(draft_bytes[n:]):
        return None
    from tiercel.spec.vocabulary_map import VocabularyMap

    found = VocabularyMap(target_bytes, draft_bytes)
    if found.n_shared < _N_SHARED_MIN:
        raise ConfigError(
            f"{where}: its vocabulary has {found.n_shared} tokens in common with the target's; {_N_SHARED_MIN} are "
            "needed; choose a draft model of the target's family"
        )
    import logging

    logging.getLogger(__name__).info(
        "speculation: %s has another vocabulary, of which %s tokens are the target's too",
        draft.resolved.display_name,
        f"{found.n_shared:,}",
    )
    return found
