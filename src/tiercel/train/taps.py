"""What the target computes of each token, kept for training: residual streams at the taps, and the final normed row.

Our own runner computes them, with the weights and the rounding that the drafter will meet when it is used. One file a
shard of conversations, float16 [tokens, (taps + 1) * E], beside a manifest (`store`); it is mapped, not read.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError, TiercelError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.train.store import check_room, write_whole
from tiercel.train.texts import Conversation

if TYPE_CHECKING:
    from tiercel.boot.plan import Plan
    from tiercel.runner.native import NativeRunner

Halves = npt.NDArray[np.float16]

_LARGEST = float(np.finfo(np.float16).max)


class TapRunner:
    """Computes whole texts and gives out what is tapped. Owns its runner; `close` ends it."""

    def __init__(self, plan: "Plan", taps: Sequence[int]) -> None:
        """Record the target's program with `taps` and pack its weights.

        Raises: UnsupportedModel: a layer cannot be tapped. OutOfPages: there is not the memory.
        """
        from tiercel.boot.plan import planned_tensors
        from tiercel.boot.runner import build_runner
        from tiercel.ops.passes import lower_and_fuse
        from tiercel.ops.recorder import ComputeDtype

        program = plan.model.record(
            planned_tensors(plan.checkpoint, plan.model.expected_weights(), plan.options.quantization),
            compute_dtype=ComputeDtype.FLOAT32 if plan.is_float32_compute else ComputeDtype.AUTO,
            max_len_tokens=plan.capacity.max_len_tokens,
            norm_weights_include_one=plan.checkpoint.norm_weights_include_one,
            taps=tuple(taps),
        )
        self._runner: NativeRunner = build_runner(
            msgspec.structs.replace(plan, lowered=lower_and_fuse(program), placement=None)
        )
        self._n_steps = 0

    def rows(self, texts: Sequence[npt.NDArray[np.int32]]) -> Iterator[Halves]:
        """Give each text's rows, float16 [T, (taps + 1) * E], in the order of the texts.

        Requires: each text fits a step and a slot.
        Raises: TiercelError: a value is beyond what float16 holds.
        """
        for group in self._groups(texts):
            rows = self._step(group)
            worst = float(np.abs(rows).max(initial=0.0))
            if not worst <= _LARGEST:
                raise TiercelError(
                    f"train: the target computes values as large as {worst:g}, more than float16 holds; "
                    "leave out the last of the taps"
                )
            yield from np.split(rows.astype(np.float16), np.cumsum([len(text) for text in group])[:-1])

    def _groups(self, texts: Sequence[npt.NDArray[np.int32]]) -> Iterator[list[npt.NDArray[np.int32]]]:
        limits = self._runner.limits
        group: list[npt.NDArray[np.int32]] = []
        n_tokens = n_pages = 0
        for text in texts:
            pages = -(-len(text) // limits.page_size_tokens)
            if group and (
                len(group) == limits.n_slots
                or n_tokens + len(text) > limits.max_step_tokens
                or (limits.n_pages and n_pages + pages > limits.n_pages)
            ):
                yield group
                group, n_tokens, n_pages = [], 0, 0
            group.append(text)
            n_tokens, n_pages = n_tokens + len(text), n_pages + pages
        if group:
            yield group

    def _step(self, group: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        runner, page = self._runner, 0
        for slot, text in enumerate(group):
            n_pages = -(-len(text) // runner.limits.page_size_tokens)
            runner.admit(slot, text.tolist(), len(text), SamplingParams(temperature=0.0), 0, ())
            runner.set_pages(slot, 0, range(page, page + n_pages))
            page += n_pages
        lengths = np.array([len(text) for text in group], np.int32)
        slots, zeros = np.arange(len(group), dtype=np.int32), np.zeros(len(group), np.int32)
        no = np.zeros(len(group), bool)
        self._n_steps += 1
        runner.submit(StepPlan(self._n_steps, slots, zeros, lengths, no, no, n_logprobs=None))
        runner.collect()
        rows = runner.last_hidden(int(lengths.sum()))
        for slot in range(len(group)):
            runner.release(slot)
        return rows

    def close(self) -> None:
        """End the runner. Idempotent."""
        self._runner.close()


def record_taps(
    make_runner: Callable[[], TapRunner],
    folder: Path,
    shards: Sequence[Sequence[Conversation]],
    width: int,
    on_shard: Callable[[float], None],
) -> None:
    """Compute what is missing of the shards' rows; `width` is (taps + 1) * E. No runner is made if nothing is.

    Raises: TiercelError: there is no room on the disk.
    """
    missing = [i for i, shard in enumerate(shards) if shard and not _path(folder, i).exists()]
    n_tokens = sum(len(one.token_ids) for i in missing for one in shards[i])
    check_room(folder, 2 * n_tokens * width + (64 << 20), "the taps")
    if not missing:
        return
    runner = make_runner()
    try:
        for n_done, i in enumerate(missing):
            on_shard(n_done)
            rows = np.concatenate(list(runner.rows([one.token_ids for one in shards[i]])))
            assert rows.shape[1] == width, f"taps: rows of {rows.shape[1]} instead of {width}"
            write_whole(_path(folder, i), partial(np.save, arr=rows))
    finally:
        runner.close()
    on_shard(len(missing))


class TapFiles:
    """The rows of texts, mapped. Knows where each begins."""

    def __init__(self, folder: Path, shards: Sequence[Sequence[Conversation]], *, n_taps: int, hidden: int) -> None:
        """Map the files.

        Raises: ModelFileError: one is missing or not of these texts.
        """
        self.n_taps, self.hidden = n_taps, hidden
        width = (n_taps + 1) * hidden
        self._files: list[Halves | None] = []
        for i, shard in enumerate(shards):
            n_rows = sum(len(one.token_ids) for one in shard)
            self._files.append(_mapped(_path(folder, i), (n_rows, width)) if n_rows else None)

    def rows(self, text: Conversation) -> Halves:
        """Return a view of a text's rows, float16 [T, (taps + 1) * E]."""
        file = self._files[text.shard]
        assert file is not None, "taps: a text of an empty shard"
        return file[text.first_row : text.first_row + len(text.token_ids)]


def _path(folder: Path, shard: int) -> Path:
    return folder / f"taps-{shard:05}.npy"


def _mapped(path: Path, shape: tuple[int, int]) -> Halves:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: is damaged ({error}); remove it, and it is made again") from error
    if found.shape != shape or found.dtype != np.float16:
        raise ModelFileError(
            f"{path}: holds {found.dtype} of {list(found.shape)}; float16 of {list(shape)} is needed; remove it, and "
            "it is made again"
        )
    rows: Halves = found
    return rows
