"""What is speculated with a plan's model."""

from typing import TYPE_CHECKING

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.boot.plan import Plan, settings_of

if TYPE_CHECKING:
    from tiercel.engine.own_drafts import OwnDrafts
    from tiercel.engine.speculation import Speculation
    from tiercel.runner.native import NativeRunner
    from tiercel.spec.drafters.interface import Drafter
    from tiercel.spec.settings import SpeculationSettings


def speculation_settings(plan: Plan) -> "SpeculationSettings":
    """Return how tokens of this model are drafted.

    Raises: ConfigError: what was asked for is not there, or not for this model.
    """
    settings = settings_of(plan.options)
    if plan.drafter is not None:
        settings = msgspec.structs.replace(settings, n_tokens_max=plan.drafter.n_draft)
    cannot = _why_no_drafts(plan)
    if cannot is None or settings.method is None:
        return settings
    if settings.is_asked:
        raise ConfigError(f"speculative: {settings.method} was asked for; {cannot}; leave it at auto, or off")
    return msgspec.structs.replace(settings, method=None)


def _why_no_drafts(plan: Plan) -> str | None:
    if plan.pooling is not None:
        return "a pooling model generates nothing"
    return None


def n_draft_rows(plan: Plan) -> int:
    """Return how many rows of a step may be drafts; the runner has room for so many more."""
    return speculation_settings(plan).n_rows_max(plan.capacity.max_num_seqs)


def make_speculation(
    plan: Plan, runner: "NativeRunner", drafter: "Drafter | None" = None
) -> "Speculation | OwnDrafts | None":
    """Make what an engine speculates with; None: nothing is speculated. `drafter`: a model driven between steps."""
    settings = speculation_settings(plan)
    if settings.method is None:
        if plan.pooling is None and not settings.is_asked:
            import logging

            logging.getLogger(__name__).info("speculation: off, as %s", _why_no_drafts(plan))
        return None
    if settings.is_own:
        from tiercel.engine.own_drafts import OwnDrafts

        return OwnDrafts(settings, n_draft_max=runner.limits.n_draft_max, tell=runner.set_draft_policy)
    from tiercel.engine.speculation import Speculation

    return Speculation(drafter or settings.make_drafter(), settings, vocab_size=runner.limits.vocab_size)
