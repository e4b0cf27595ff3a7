"""A drafter that is a model, beside the model that it drafts for: found, checked, and recorded."""

import logging
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError, ModelFileError, UnsupportedModel
from tiercel.hub.resolve import resolve
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    from tiercel.loaders.checkpoint import Checkpoint
    from tiercel.models.drafters.checkpoint import DraftCheckpoint
    from tiercel.models.drafters.interface import DraftModel
    from tiercel.models.info import ModelInfo
    from tiercel.models.model import Model
    from tiercel.ops.lowered import Lowered
    from tiercel.runner.drafting import Drafting
    from tiercel.spec.settings import SpeculationSettings

_log = logging.getLogger(__name__)

_N_CHAINED = 3  # each takes a pass


class PlannedDrafter(msgspec.Struct, frozen=True):
    """A drafter as it will be used."""

    checkpoint: "DraftCheckpoint"
    lowered: "tuple[Lowered, ...]"
    n_draft: int  # of one sequence in a step
    text: str  # all its modules' arithmetic but the weights' values
    n_target_vocab: int


def open_drafter_for(
    options: EngineOptions, settings: "SpeculationSettings", model: "Model", checkpoint: "Checkpoint"
) -> "DraftCheckpoint | None":
    """Open the drafter that is asked for; None: none that runs in the model's own steps.

    Raises:
        ModelNotFound, ModelFileError, UnsupportedModel: it cannot be read, or is of another target.
        ConfigError: it is of another kind than was said, or makes fewer drafts.
    """
    if not settings.is_own:
        return None
    from tiercel.models.drafters.checkpoint import open_drafter, open_mtp

    if settings.method == "mtp":
        found = open_mtp(model, checkpoint.tensors, settings.n_tokens_max if settings.says_n_tokens else None)
    else:
        named = resolve(settings.model, hf_token=options.hf_token, download_dir=options.download_dir)
        found = open_drafter(named.path, model, checkpoint.tensors)
    try:
        if found.model.name != settings.method:
            raise ConfigError(
                f"speculative_config.method: got {settings.method}; {settings.model} is a {found.model.name} drafter; "
                "say that, or leave the method out"
            )
        said = [settings.n_tokens_max] if settings.says_n_tokens else []
        for n in (*said, *(n for _, _, n in settings.n_tokens_by_batch if n)):
            found.model.check_n_draft(n)
        if found.trained_on not in (None, checkpoint.digest()):
            _log.info(
                "speculation: %s was trained on another file than %s; its drafts come as often as the two agree",
                settings.model,
                checkpoint.path,
            )
    except BaseException:
        found.close()
        raise
    return found


def kind_of(options: EngineOptions, name: str) -> str:
    """Return the method that a drafter's own config names.

    Raises:
        ModelNotFound, ModelFileError: it cannot be read.
        UnsupportedModel: it is of no known kind.
    """
    from tiercel.loaders.draft_checkpoint import open_draft_files
    from tiercel.models.drafters.config import in_one_form

    named = resolve(name, hf_token=options.hf_token, download_dir=options.download_dir)
    try:
        files = open_draft_files(named.path)
        try:
            return in_one_form(files.config)[0]
        finally:
            files.checkpoint.close()
    except (ModelFileError, UnsupportedModel) as error:
        raise type(error)(
            f'speculative_config.model: {error}; if it is a whole model that is to draft, say "method": "draft_model"'
        ) from error


def usual_number(drafter: "DraftModel") -> int:
    """Return how many drafts are made of a sequence when nobody says: all of a block, of a chain as many as it has
    modules, or a few if it has one only.
    """
    n_chained = drafter.n_modules if drafter.n_modules > 1 else _N_CHAINED
    return drafter.n_draft_max if drafter.kind == "block" else min(n_chained, drafter.n_draft_max)


def n_draft_of(settings: "SpeculationSettings", drafter: "DraftModel") -> int:
    """Return how many drafts are made of a sequence."""
    return settings.n_tokens_max if settings.says_n_tokens else usual_number(drafter)


def drafting_bytes_of(
    options: EngineOptions,
    settings: "SpeculationSettings",
    info: "ModelInfo",
    n_slots: int,
    opened: "DraftCheckpoint | None",
) -> int:
    """Return the most bytes that drafting takes beside the pages; see `runner.draft_memory`.

    A model that drafts between the steps is not in it: it has a plan of its own.
    """
    from tiercel.runner.draft_memory import drafting_bytes

    if settings.method is None or n_slots < 1:
        return 0
    if opened is not None:
        settings = msgspec.structs.replace(settings, n_tokens_max=n_draft_of(settings, opened.model))
    n_rows = settings.n_rows_max(n_slots)
    of_target: dict[str, Any] = {
        "n_draft_rows": n_rows,
        "n_slots": n_slots,
        "max_step_tokens": max(options.max_num_batched_tokens, n_slots) + n_rows,
        "vocab_size": info.vocab_size,
        "state_layers": info.state_layers,
    }
    if opened is None:
        return drafting_bytes(**of_target)
    model, is_float32 = opened.model, options.compute_dtype == "float32"
    head = model.head()
    return drafting_bytes(
        **of_target,
        n_pass_rows=n_slots * (model.n_block_rows - model.first_logits_row),
        n_pass_vocab=head.n_vocab,
        weight_bytes=sum(
            (Format.F32 if is_float32 else one.format).nbytes(prod(one.shape)) for one in opened.planned().values()
        ),
        head_shapes=[opened.tensors[name].shape for name in head.weights.values()],
    )


def drafting_of(drafter: PlannedDrafter, settings: "SpeculationSettings") -> "Drafting":
    """Make what a runner drafts with.

    Raises: ModelFileError: a weight of the drafter's head is no number.
    """
    from tiercel import _native
    from tiercel.runner.drafting import Drafting

    model, checkpoint = drafter.checkpoint.model, drafter.checkpoint
    head = model.head()
    return Drafting(
        programs=drafter.lowered,
        kind=model.kind,
        n_draft_max=drafter.n_draft,
        head=_native.make_draft_head(
            head.kind,
            head.n_vocab,
            drafter.n_target_vocab,
            checkpoint.head_arrays(),
            markov=head.markov,
            topk=head.topk,
            confidence_reads_markov=head.confidence_reads_markov,
            d2t=checkpoint.d2t,
        ),
        n_block_rows=model.n_block_rows,
        first_logits_row=model.first_logits_row,
        mask_token_id=model.mask_token_id,
        draws=settings.draws,
    )
