"""Texts for training: conversations of which the target wrote every word, or every word but a given question's.

The target is shown the beginning of a user's turn and writes one ("Magpie"), then answers it; every second question is
taken from a list instead, as long as that lasts. Some conversations are held out: their answers are greedy, so that
speculation can be walked through them exactly. All is a function of the seed, the options and the target: what comes of
conversation i depends on i alone, so a run that was killed goes on with the shard it had not finished.

Layout: `conversations-00000.safetensors` .. in a folder with a manifest (`store`), `SHARD` numbers each.
Source: Xu et al. 2024 (arXiv:2406.08464).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ConfigError, ModelFileError, RequestError
from tiercel.protocol.params import SamplingParams
from tiercel.train.store import write_whole

if TYPE_CHECKING:
    from tiercel.llm.llm import LLM

Ints = npt.NDArray[np.int32]

SHARD = 128  # conversations: enough that the last answers of a shard, which run alone, do not count
HOLD_OUT_EVERY = 7  # odd, so that what is held out has written and given questions alike
_MARK = "USERTURNHERE"
_LONGEST_QUESTION = 150
_SHARDS_OF_NOTHING = 3  # after which a target that writes less than a token a conversation is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What decides the texts, beside the target. `n_answer_tokens` only says when there are enough."""

    n_answer_tokens: int
    n_held_out: int
    max_len_tokens: int
    temperature: float
    top_p: float
    greedy_frac: float
    seed: int
    prompts: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for a folder of texts to be gone on with."""
        import hashlib

        digest = hashlib.sha256("\0".join(self.prompts).encode()).hexdigest() if self.prompts else None
        names = ("n_held_out", "max_len_tokens", "temperature", "top_p", "greedy_frac", "seed")
        return {name: getattr(self, name) for name in names} | {"prompts_sha256": digest}


class Conversation(NamedTuple):
    """One text. `answer_start` is the index of the answer's first token; `is_greedy`: the answer is the likeliest.

    `shard` and `first_row` say where what is kept of its tokens begins.
    """

    token_ids: Ints
    answer_start: int
    is_greedy: bool
    is_held_out: bool
    shard: int = 0
    first_row: int = 0


def make_texts(
    make_llm: Callable[[], "LLM"], folder: Path, options: TextOptions, on_tokens: Callable[[int, str], None]
) -> list[list[Conversation]]:
    """Have the target write until there are `n_answer_tokens` to learn from; return all texts by shard.

    No engine is made if they are there already.

    Raises:
        ConfigError: the target has no chat template, or writes next to nothing.
        TiercelError: there is no room for the files.
    """
    shards: list[list[Conversation]] = []
    with contextlib.ExitStack() as stack:
        writer: _Writer | None = None
        while _n_learned(shards) < options.n_answer_tokens:
            path = shard_path(folder, len(shards))
            if not path.exists():
                writer = writer or _Writer(stack.enter_context(make_llm()), options)
                save_shard(path, writer.write_shard(len(shards)))
            shards.append(read_shard(path, len(shards)))
            on_tokens(_n_learned(shards), f"{sum(map(len, shards))} conversations")
            if len(shards) >= _SHARDS_OF_NOTHING and _n_learned(shards) < len(shards) * SHARD:
                raise ConfigError(
                    f"train: the target wrote {_n_learned(shards)} tokens of answers in {len(shards) * SHARD} "
                    "conversations, too few to learn from; give questions with --prompts, or choose another target"
                )
    if not any(one.is_held_out for shard in shards for one in shard):
        raise ConfigError("train: no conversation is held out to measure on; raise --held-out or --tokens")
    return shards


def _n_learned(shards: Sequence[Sequence[Conversation]]) -> int:
    return sum(n_answer_tokens(shard) for shard in shards)


def n_answer_tokens(conversations: Sequence[Conversation]) -> int:
    """Return how many tokens of answers there are to learn from."""
    return sum(len(one.token_ids) - one.answer_start for one in conversations if not one.is_held_out)


def distinct(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return each text once, and none to learn from whose question is one of those held out."""
    held_out = {one.token_ids[: one.answer_start].tobytes() for one in conversations if one.is_held_out}
    seen: set[bytes] = set()
    kept = []
    for one in conversations:
        if not one.is_held_out and one.token_ids[: one.answer_start].tobytes() in held_out:
            continue
        if one.token_ids.tobytes() not in seen:
            seen.add(one.token_ids.tobytes())
            kept.append(one)
    return kept


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read questions: one a line; or, in a file named .jsonl, the `prompt` of each line's object.

    Raises: ConfigError: the file cannot be read, or has none.
    """
    import json

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts: {path}: {error}; need a file of UTF-8 text, one question a line") from None
    found = []
    for number, line in enumerate(lines, 1):
        if path.suffix != ".jsonl" or not line.strip():
            found.append(line.strip())
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(f'prompts: {path}, line {number}: need an object with a text: {{"prompt": "…"}}')
        found.append(prompt.strip())
    found = [one for one in found if one]
    if not found:
        raise ConfigError(f"prompts: {path} is empty; need one question a line")
    return tuple(found)


def shard_path(folder: Path, shard: int) -> Path:
    """Return where a shard's conversations are."""
    return folder / f"conversations-{shard:05}.safetensors"


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to a file.

    Raises: TiercelError: there is no room.
    """
    from safetensors.numpy import save

    tokens = [one.token_ids for one in conversations]
    arrays = {
        "token_ids": np.concatenate([*tokens, np.zeros(0, np.int32)]),
        "lengths": np.array([len(one) for one in tokens], np.int32),
        "answer_starts": np.array([one.answer_start for one in conversations], np.int32),
        "flags": np.array([one.is_greedy + 2 * one.is_held_out for one in conversations], np.uint8),
    }
    write_whole(path, lambda file: file.write(save(arrays)))


def read_shard(path: Path, shard: int) -> list[Conversation]:
    """Read what `save_shard` wrote.

    Raises: ModelFileError: the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
        lengths, starts, flags = (arrays[name] for name in ("lengths", "answer_starts", "flags"))
        ends = np.cumsum(lengths)
        pieces = np.split(arrays["token_ids"], ends)
        if pieces.pop().size or not np.all((starts >= 1) & (starts < lengths)):
            raise ValueError("its lengths do not fit")
        return [
            Conversation(piece, int(start), bool(flag & 1), bool(flag & 2), shard, int(end) - len(piece))
            for piece, start, flag, end in zip(pieces, starts, flags, ends, strict=True)
        ]
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ModelFileError(f"{path}: is damaged ({error}); remove it, and it is made again") from error


class _Writer:
    """Has the target write shards."""

    def __init__(self, llm: "LLM", options: TextOptions) -> None:
        if not llm.has_chat_template:
            raise ConfigError(
                "train: the target has no chat template, and writes no conversations by itself; choose a chat model"
            )
        self._llm, self._options = llm, options
        self._tokenizer = llm.get_tokenizer()
        rendered = llm.engine.conversations.prompt([{"role": "user", "content": _MARK}])["prompt"]
        before, mark, after = rendered.partition(_MARK)
        if not mark:
            raise ConfigError("train: the target's chat template does not show what a user says; choose another target")
        self._turn = self._tokenizer.encode(before, add_special_tokens=False)
        self._end_ids = self._tokenizer.encode(after, add_special_tokens=False)[:1]

    def write_shard(self, shard: int) -> list[Conversation]:
        """Return the conversations of one shard; those that came to nothing are left out."""
        options = self._options
        numbers = range(shard * SHARD, (shard + 1) * SHARD)
        questions = {i: self._given(i) for i in numbers}
        open_ones = [i for i, question in questions.items() if question is None]
        turns = self._llm.generate(
            [{"prompt_token_ids": self._turn} for _ in open_ones],
            [
                SamplingParams(
                    temperature=max(options.temperature, 0.1),
                    top_p=options.top_p,
                    max_tokens=_LONGEST_QUESTION,
                    seed=self._seed(i, 0),
                    stop_token_ids=self._end_ids,
                )
                for i in open_ones
            ],
            use_tqdm=False,
        )
        for i, turn in zip(open_ones, turns, strict=True):
            if turn.outputs[0].finish_reason == "stop":
                questions[i] = turn.outputs[0].text.strip()
        prompts = {i: self._prompt(question) for i, question in questions.items() if question}
        return self._answers({i: ids for i, ids in prompts.items() if ids is not None})

    def _answers(self, prompts: dict[int, list[int]]) -> list[Conversation]:
        options = self._options
        greedy = {i: self.is_held_out(i) or self._draw(i) < options.greedy_frac for i in prompts}
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts.values()],
            [
                SamplingParams(
                    temperature=0.0 if greedy[i] else options.temperature,
                    top_p=1.0 if greedy[i] else options.top_p,
                    max_tokens=options.max_len_tokens - len(ids),
                    seed=self._seed(i, 1),
                )
                for i, ids in prompts.items()
            ],
            use_tqdm=False,
        )
        made = []
        for (i, ids), output in zip(prompts.items(), outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            if len(answer) >= 2:
                tokens = np.array(ids + answer, np.int32)
                made.append(Conversation(tokens, len(ids), greedy[i], self.is_held_out(i)))
        return made

    def _given(self, i: int) -> str | None:
        prompts = self._options.prompts
        return prompts[i // 2] if i % 2 and i // 2 < len(prompts) else None

    def is_held_out(self, i: int) -> bool:
        """Tell whether conversation i is for measuring."""
        return i % HOLD_OUT_EVERY == 0 and i // HOLD_OUT_EVERY < self._options.n_held_out

    def _prompt(self, question: str) -> list[int] | None:
        """Return a question's token ids; None if it leaves no room for an answer, or cannot be asked."""
        try:
            ids: list[int] = self._llm.engine.conversations.prompt([{"role": "user", "content": question}])[
                "prompt_token_ids"
            ]
        except RequestError:
            return None
        return ids if len(ids) <= self._options.max_len_tokens - 32 else None

    def _draw(self, i: int) -> float:
        return float(np.random.default_rng([self._options.seed, i]).random())

    def _seed(self, i: int, part: int) -> int:
        return (self._options.seed * 1_000_003 + 2 * i + part) % (1 << 31)
