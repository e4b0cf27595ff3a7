"""What is speculated with a plan's model."""

from typing import TYPE_CHECKING

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.boot.plan import Plan

if TYPE_CHECKING:
    from tiercel.engine.speculation import Speculation
    from tiercel.spec.drafters.interface import Drafter
    from tiercel.spec.settings import SpeculationSettings


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
    return None


def n_draft_rows(plan: Plan) -> int:
    """Return how many rows of a step may be drafts; the runner has room for so many more."""
    return speculation_settings(plan).n_rows_max(plan.capacity.max_num_seqs)


def make_speculation(plan: Plan, vocab_size: int, drafter: "Drafter | None" = None) -> "Speculation | None":
    """Make what an engine speculates with; None: nothing is speculated. `drafter`: one that is a model."""
    settings = speculation_settings(plan)
    if settings.method is None:
        if plan.pooling is None and not settings.is_asked:
            import logging

            logging.getLogger(__name__).info("speculation: off, as %s", _why_no_drafts(plan))
        return None
    from tiercel.engine.speculation import Speculation

    return Speculation(drafter or settings.make_drafter(), settings, vocab_size=vocab_size)
