"""What `tiercel train-drafter` is told: one frozen value of rows of the table of options. Knows no torch."""

from dataclasses import dataclass
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.base.options import Option, option, options_of, parse_float
from tiercel.base.units import parse_int_human


def parse_taps(text: str) -> tuple[int, ...]:
    """Read layers between commas, ascending.

    Raises: ConfigError: it is something else.
    """
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or found[0] < -1:
        raise ConfigError(f"got {text!r}; need layers in ascending order such as 2,15,27; -1 is the embeddings")
    return found


def _count(default: int | None, group: str, help: str, why: str, least: int = 1, **more: Any) -> Any:
    return option(default, parse=parse_int_human, least=least, metavar="N", group=group, help=help, why=why, **more)


def _part(default: float, group: str, help: str, why: str, most: float | None = None, least: float = 0.0) -> Any:
    return option(default, parse=parse_float, least=least, most=most, metavar="X", group=group, help=help, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a drafter is made. Those of the groups texts and drafter decide what comes out, and those of training but for
    minutes and steps; a folder that was begun with others is refused.
    """

    data: str | None = option(
        None,
        metavar="DIR",
        group="texts",
        is_common=True,
        help="where texts and what the target computes of them are kept; several drafters may share one",
        why="`data` in the output folder",
    )
    tokens: int = _count(
        1_250_000,
        "texts",
        "tokens of answers to learn from",
        "as many as 45 minutes of steps look at once; with a sixth of them drafters learn them by heart",
        is_common=True,
    )
    prompts: str | None = option(
        None,
        metavar="FILE",
        group="texts",
        is_common=True,
        help="questions, one a line, or the `prompt` of each object of a .jsonl file; they are half of the questions "
        "as long as they last",
        why="the target asks itself",
    )
    held_out: int = _count(64, "texts", "conversations to measure on, which are not learned from", "enough to tell 5 %")
    max_len: int = _count(384, "texts", "tokens of a conversation at most", "answers of chat", least=64)
    temperature: float = _part(0.8, "texts", "of what is not greedy", "what engines serve with", most=2.0)
    top_p: float = _part(0.95, "texts", "of what is not greedy", "the same", most=1.0, least=0.01)
    greedy_frac: float = _part(0.5, "texts", "part of the answers that are greedy", "both are served", most=1.0)
    layers: int | None = _count(None, "drafter", "layers of the drafter", "2, of eagle3 its only one")
    draft_tokens: int = _count(
        4, "drafter", "drafts of a block, or passes of a chain that are learned", "a fifth comes seldom", most=32
    )
    rank: int | None = _count(
        None,
        "drafter",
        "columns of the tables by the token before, which eagle3 has not",
        "64, a quarter of large ones'",
    )
    topk: int | None = _count(
        None,
        "drafter",
        "of how many of a slot's best tokens one is drafted; of dspark, 0 is all",
        "16 for dflash2, as published; 64 for dspark, whose head then reads no more",
        least=0,
    )
    draft_vocab: int = _count(8192, "drafter", "tokens that can be drafted", "97 % of what is said", least=32)
    taps: tuple[int, ...] | None = option(
        None,
        parse=parse_taps,
        metavar="LAYERS",
        group="drafter",
        help="layers of the target whose residual stream is read, such as 1,8,14,20,27",
        why="five from the second to the fourth last, three for eagle3",
    )
    minutes: float = _part(45.0, "training", "minutes to train", "two drafters in two hours", least=0.01)
    steps: int | None = _count(
        None, "training", "steps to train, whatever time they take; makes the result repeat itself", "minutes count"
    )
    learning_rate: float = _part(1.5e-3, "training", "the highest rate of AdamW", "measured; 1e-3 is safer", most=1.0)
    texts_a_step: int = _count(4, "training", "texts that a step learns from", "fills two cores")
    anchors: int = _count(32, "training", "places of each text that a step drafts at", "fills two cores")
    save_minutes: float = _part(4.0, "training", "minutes between states on disk", "little is lost", least=0.01)
    seed: int = _count(0, "training", "of the texts, the first weights and the order", "any will do", least=0)
    device: str = option(
        "auto",
        metavar="DEVICE",
        group="training",
        choices=("auto", "cpu", "cuda"),
        help="where torch computes; the target's own steps are on the CPU",
        why="a GPU if torch has one",
    )
    precision: str = option(
        "auto",
        metavar="TYPE",
        group="training",
        choices=("auto", "float32", "bfloat16"),
        help="numbers that products are made of while training; weights and sums are float32",
        why="bfloat16 where the processor multiplies it: a step takes two thirds of the time",
    )
    threads: int | None = _count(None, "training", "threads to compute with", "one for each processor")

    def __post_init__(self) -> None:
        for row in train_rows():
            if row.name != "taps":
                row.check(getattr(self, row.name))


def train_rows() -> tuple[Option, ...]:
    """Give the rows of `TrainOptions`."""
    return options_of(TrainOptions)
