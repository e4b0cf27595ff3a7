"""A plan's tokenizer and what makes prompts of conversations."""

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tiercel.base.errors import ModelFileError
from tiercel.boot.plan import Plan
from tiercel.hub.resolve import resolve
from tiercel.hub.store import default_folder

if TYPE_CHECKING:
    from tiercel.loaders.checkpoint import Checkpoint
    from tiercel.text.conversation import Conversations
    from tiercel.text.tokenizer import Tokenizer


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


def load_text(plan: Plan) -> "tuple[Tokenizer | None, Conversations]":
    """Load all that has to do with text. A chat template is compiled by who first needs it."""
    from tiercel.text.conversation import Conversations

    tokenizer = load_tokenizer(plan)
    return tokenizer, Conversations(tokenizer)
