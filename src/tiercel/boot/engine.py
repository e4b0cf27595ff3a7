"""From a person's options to a running engine.

Order: find the files, read the config, record the program, size the pool, then pack weights while another thread builds
the tokenizer. Nothing is computed before everything is known to fit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tiercel.base import env
from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError
from tiercel.boot.draft_model import make_draft_model, plan_draft_model
from tiercel.boot.plan import Plan, make_plan, resolve_model
from tiercel.boot.runner import build_runner
from tiercel.boot.speculation import make_speculation, n_draft_rows
from tiercel.boot.start import Start
from tiercel.boot.text import eos_ids, load_text

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiercel.engine.client import EngineClient
    from tiercel.engine.config import EngineConfig
    from tiercel.engine.own_drafts import OwnDrafts
    from tiercel.engine.pooling import Pooler
    from tiercel.engine.speculation import Speculation
    from tiercel.kv.tiers.placed import MakeTiers
    from tiercel.kv.tiers.registry import TierSpec
    from tiercel.runner.native import NativeRunner
    from tiercel.sampling.grammar_limits import GrammarLimits
    from tiercel.text.conversation import Conversations
    from tiercel.text.thinking_budget import ReasoningConfig
    from tiercel.text.tokenizer import Tokenizer

_T = TypeVar("_T")


class Engine(msgspec.Struct, frozen=True):
    """A running engine and what front ends may know of it. `close` ends it."""

    plan: Plan
    runner: "NativeRunner"
    client: "EngineClient"
    tokenizer: "Tokenizer | None"
    conversations: "Conversations"
    speculation: "Speculation | OwnDrafts | None" = None  # of the engine's thread

    def close(self) -> None:
        """Abort what runs, stop the threads, give back memory. Idempotent."""
        self.client.close()
        self.plan.close()


def _tell_unread() -> None:
    """Log, once a start, the variables of vLLM's that are set and not read here."""
    told = env.unread()
    if told:
        import logging

        logging.getLogger(__name__).warning("%s", told)


def build_engine(options: EngineOptions, *, on_plan: Callable[[Plan], None] | None = None) -> Engine:
    """Build and start an engine.

    `on_plan` hears of the plan before the weights are packed (to print the capacity line, say).

    Raises: ModelNotFound, ModelFileError, UnsupportedModel, ConfigError, OutOfPages: as the message says.
    """
    tiers = _read_tiers(options)
    resolved = resolve_model(options)
    _tell_unread()
    start = Start(options, resolved)
    # Imported while threads pack.
    from tiercel.engine.client import EngineClient
    from tiercel.engine.core import EngineCore

    plan = start.plan() or make_plan(options, resolved)
    draft: Plan | None = None
    speculation: Speculation | OwnDrafts | None = None
    try:
        _ = plan.generation_defaults  # a folder without any is told before weights are packed
        if on_plan is not None:
            on_plan(plan)
        draft = plan_draft_model(plan)
        # The native threads that pack do not hold the interpreter's lock, so both go on at once. What else there is to
        # do after a kept plan holds it: two threads would only pass it to and fro (9 ms).
        text = _at_once(plan) if start.is_used else _in_thread(lambda: load_text(plan)).result
        runner = build_runner(plan, start.weights())
        try:
            tokenizer, conversations = text()
            drafter = None if draft is None else make_draft_model(plan, draft, tokenizer)
            speculation = make_speculation(plan, runner, drafter)
            core = EngineCore(
                runner,
                engine_config(plan),
                make_tiers=_make_tiers(plan, tiers, runner),
                speculation=speculation,
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
            if speculation is not None:
                speculation.close()
            runner.close()
            raise
    except BaseException:
        plan.close()
        if draft is not None:
            draft.checkpoint.close()
        raise
    core.start()
    return Engine(plan, runner, client, tokenizer, conversations, speculation)


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
    from tiercel.hub.store import default_folder
    from tiercel.kv.tiers.identity import TierIdentity
    from tiercel.kv.tiers.placed import place_tiers
    from tiercel.loaders.whole_digest import whole_digest

    group = runner.page_group
    if group is None or not plan.is_prefix_caching or runner.limits.needs_whole:
        raise ConfigError(
            f"kv_tiers: pages of {plan.info.architecture} are not used for other requests, or prefix caching is off; "
            "leave kv_tiers out"
        )
    size = plan.capacity.page_size_tokens
    state, about = runner.state_group, plan.resolved.display_name
    groups = (group,) if state is None else (group, state)
    weights = f"{plan.identity} {whole_digest(plan.checkpoint, default_folder().parent / 'digests')}"
    identity = TierIdentity(plan.info.architecture, weights, size, groups, about)
    return lambda wake, clock: place_tiers(specs, identity, wake, clock)


def _pooler(plan: Plan, runner: "NativeRunner") -> "Pooler":
    from tiercel.engine.pooling import Pooler

    assert plan.pooling is not None
    return Pooler(plan.pooling, runner.limits.row_width)


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


def _at_once(plan: Plan) -> "Callable[[], tuple[Tokenizer | None, Conversations]]":
    text = load_text(plan)
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
