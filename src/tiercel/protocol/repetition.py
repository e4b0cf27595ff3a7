"""`RepetitionDetectionParams`: when an output that only repeats itself is ended, under vLLM's names."""

import msgspec

from tiercel.base.errors import RequestError

PATTERN_TOKENS_MAX = 512  # each size is looked at for each token: so many take some 20 us
COUNT_MAX = 1 << 20


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """An output ends when its last tokens are one pattern, `min_count` times in a row.

        max_pattern_size   tokens of the longest pattern looked for; 0: nothing is looked for; at most 512
        min_pattern_size   tokens of the shortest; 0 is 1
        min_count          2 and up, unless max_pattern_size is 0

    Raises:
        RequestError: a value is out of its range; `param` names it.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("max_pattern_size", PATTERN_TOKENS_MAX),
            ("min_pattern_size", PATTERN_TOKENS_MAX),
            ("min_count", COUNT_MAX),
        ):
            got = getattr(self, name)
            if type(got) is not int or not 0 <= got <= most:
                raise _refused(name, f"got {got!r:.40}; a whole number from 0 to {most} is needed")
        if self.min_pattern_size > self.max_pattern_size:
            raise _refused(
                "min_pattern_size",
                f"got {self.min_pattern_size}; at most max_pattern_size, {self.max_pattern_size}, is needed",
            )
        if self.max_pattern_size and self.min_count < 2:
            raise _refused("min_count", f"got {self.min_count}; 2 or more is needed: once is no repetition")


def _refused(field: str, why: str) -> RequestError:
    param = f"repetition_detection.{field}"
    return RequestError(f"{param}: {why}", param=param)
