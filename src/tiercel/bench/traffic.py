"""The requests that `bench serve` sends, and when: pure functions of a seed. Knows no server."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tiercel.base.errors import ConfigError

DATASETS = ("random", "prefix_repetition", "custom")
# Short common words: about one token each in any vocabulary. What a server counted is in its answer's usage.
_WORD_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
_WORDS = tuple(_WORD_TEXT.split())


@dataclass(frozen=True, slots=True)
class Query:
    """One request: its prompt, and how many tokens are asked for."""

    prompt: str
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent and how fast; vLLM's names and meanings, but lengths of prompts are in words, about a token each.

    `request_rate` None: all at once, as `max_concurrency` lets them. `burstiness` is the shape of a gamma
    distribution: 1 is Poisson, less comes in bursts, more is even. `random_prefix_len`: words that all prompts share;
    `num_prefixes`: of prefix_repetition, different prefixes of that length.
    """

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 100
    random_input_len: int = 128
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    num_prefixes: int = 10
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(f"dataset-name: got {self.dataset_name!r}; need one of {', '.join(DATASETS)}")
        for name, least in (
            ("num_prompts", 1),
            ("random_input_len", 1),
            ("random_output_len", 1),
            ("random_prefix_len", 0),
            ("num_prefixes", 1),
        ):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ConfigError(f"bench serve: {flag}: got {getattr(self, name)}; need {least} or more")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"bench serve: random-range-ratio: got {self.random_range_ratio:g}; need 0 up to 1")
        if self.request_rate is not None and self.request_rate <= 0:
            raise ConfigError(f"bench serve: request-rate: got {self.request_rate:g}; need more than 0, or inf")
        if self.burstiness <= 0:
            raise ConfigError(f"bench serve: burstiness: got {self.burstiness:g}; need more than 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"bench serve: max-concurrency: got {self.max_concurrency}; need 1 or more")
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise ConfigError("bench serve: dataset-path goes with --dataset-name custom, and that needs it")


def queries(traffic: Traffic) -> list[Query]:
    """Return the requests, in order.

    Raises: ConfigError: the custom data cannot be read.
    """
    if traffic.dataset_path is not None:
        return _custom(traffic.dataset_path, traffic)
    source = random.Random(traffic.seed)
    n_prefixes = traffic.num_prefixes if traffic.dataset_name == "prefix_repetition" else 1
    prefixes = [_text(source, traffic.random_prefix_len) for _ in range(n_prefixes)]
    made = []
    for i in range(traffic.num_prompts):
        n_in, n_out = (
            max(1, source.randint(int(n * (1 - traffic.random_range_ratio)), int(n * (1 + traffic.random_range_ratio))))
            for n in (traffic.random_input_len, traffic.random_output_len)
        )
        made.append(Query(f"{prefixes[i % n_prefixes]} {_text(source, n_in)}".strip(), n_out))
    return made


def send_times(traffic: Traffic, n: int) -> list[float]:
    """Return when each of `n` requests is sent, in seconds from the start, ascending."""
    if traffic.request_rate is None:
        return [0.0] * n
    source = random.Random(traffic.seed + 1)
    scale = 1 / (traffic.request_rate * traffic.burstiness)
    at_s, now_s = [], 0.0
    for _ in range(n):
        at_s.append(now_s)
        now_s += source.gammavariate(traffic.burstiness, scale)
    # Stretched so that the whole has the asked rate, not only its average over many seeds.
    stretch = (n - 1) / traffic.request_rate / at_s[-1] if n > 1 and at_s[-1] > 0 else 1.0
    return [one * stretch for one in at_s]


def _text(source: random.Random, n_words: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(n_words))


def _custom(path: Path, traffic: Traffic) -> list[Query]:
    made = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset-path: {path.name}: {error}; need a .jsonl file") from None
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            prompt, n_out = told["prompt"], told.get("output_len", traffic.random_output_len)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'dataset-path: {path.name}:{n}: need {{"prompt": …, "output_len": …}}') from None
        if not isinstance(prompt, str) or not isinstance(n_out, int) or n_out < 1:
            raise ConfigError(f"dataset-path: {path.name}:{n}: need a prompt of text and an output_len of 1 or more")
        made.append(Query(prompt, n_out))
    if not made:
        raise ConfigError(f"dataset-path: {path.name}: holds no prompt")
    return made[: traffic.num_prompts]
