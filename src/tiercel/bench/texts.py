"""What is asked in benchmarks of speculation: work that repeats a text, and work that does not, by an index, so that
each is asked once; or a file's questions.
"""

from pathlib import Path
from typing import Final

from tiercel.base.errors import ConfigError

_PLACES: Final = ("Marlow", "Tessin", "Odense", "Kirkby", "Valdor", "Ruhpol", "Lisle", "Bergen")
_GOODS: Final = ("timber", "wool", "copper", "salt", "grain", "glass", "paper", "linen", "cider", "slate")
_NAMES: Final = ("Anna", "Bert", "Carla", "Dirk", "Eva", "Finn", "Greta", "Hugo", "Ida", "Jonas")
_TRADES: Final = (
    *("baker", "carpenter", "doctor", "farmer", "glazier"),
    *("lawyer", "miller", "nurse", "painter", "teacher"),
)
_QUESTIONS: Final = (
    "Why is the sky blue, and why are sunsets red?",
    "Tell me a story about a lighthouse keeper and a lost whale.",
    "What should I think about before I adopt a dog?",
    "Explain how a bicycle stays upright.",
    "Write a letter to a friend who has moved to another country.",
    "How did people tell the time before there were clocks?",
    "Describe a market on a rainy morning.",
    "What makes bread rise, and what can go wrong?",
    "Compare living in a city with living in a village.",
    "Give me advice for my first day at a new job.",
    "What is the difference between weather and climate?",
    "Plan a week of simple dinners for two people.",
)
KINDS: Final = ("chat", "edit", "extract")


def long_text(i: int, n_sentences: int = 15) -> str:
    """Make some forty tokens a sentence, others for each i."""
    lines = []
    for k in range(n_sentences):
        place, other = _PLACES[(i + k) % 8], _PLACES[(i + 3 * k + 1) % 8]
        good, more = _GOODS[(3 * i + k) % 10], _GOODS[(i + 7 * k + 2) % 10]
        name, trade = _NAMES[(i + 2 * k) % 10], _TRADES[(5 * i + 3 * k) % 10]
        when, much = 1700 + 13 * i + 9 * k, 20 + 7 * k + i
        lines.append(
            f"In the year {when} the {trade} {name} of {place} sold {much} crates of {good} to a merchant from "
            f"{other}, who paid with {more} and promised to return before the winter."
        )
    return " ".join(lines)


def read_questions(path: Path) -> tuple[str, ...]:
    """Read a file of questions, one a line.

    Raises: ConfigError: it cannot be read, or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"bench: questions: {path}: {error}; need a file of UTF-8 text, one a line") from None
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ConfigError(f"bench: questions: {path} is empty; need one question a line")
    return found


def question(kind: str, i: int) -> str:
    """Give the i-th thing to ask.

    edit: a text of some 600 tokens is to be written again with one name changed. extract: nine lines become JSON. chat:
    an open question.
    """
    if kind == "edit":
        return (
            f"Write the following text again, word for word, but change the name {_NAMES[i % 10]} to Peter everywhere."
            f"\n\n{long_text(i)}"
        )
    if kind == "extract":
        lines = [
            f"{_NAMES[(i + k) % 10]} is a {_TRADES[(3 * i + k) % 10]} in {_PLACES[(i + 5 * k) % 8]}." for k in range(9)
        ]
        return (
            'Turn each line into a JSON object like {"name": "Max", "trade": "cook", "town": "Ulm"}, one a line.\n\n'
            + "\n".join(lines)
        )
    assert kind == "chat"
    again = "" if i < len(_QUESTIONS) else f" This is letter {i}."
    return _QUESTIONS[i % len(_QUESTIONS)] + again
