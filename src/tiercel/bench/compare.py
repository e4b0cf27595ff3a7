"""`bench compare`: a canary's verdict between two results of `bench serve`, before and after a change.

Each measure's ratio after / before gets a 95 % interval by bootstrap (requests are drawn again, with a fixed seed):
"worse" or "better" when the whole interval lies beyond the tolerance, "same" when it lies within it, "no worse" when
only its bad end does, else "unclear".
Greedy texts of the same prompts must be the same. The verdict is "fail" if anything is worse, texts differ or more
requests failed; "unclear" if something is; else "pass".
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercel.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_N_DRAWS = 2000
_N_SLICES = 20
_LISTS = ("ttfts", "tpots", "e2els", "output_lens", "starts", "generated_texts", "errors")


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure: before, after, the ratio's interval, and what follows."""

    measure: str
    before: float
    after: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All findings. `texts`: how many greedy texts were compared and differ, or why none were."""

    findings: Sequence[Finding]
    n_texts: int
    differing: Sequence[int]
    why_no_texts: str | None
    n_failed: tuple[int, int]

    @property
    def verdict(self) -> str:
        """Pass, fail or unclear."""
        verdicts = {finding.verdict for finding in self.findings}
        if "worse" in verdicts or self.differing or self.n_failed[1] > self.n_failed[0]:
            return "fail"
        return "unclear" if "unclear" in verdicts or not self.findings else "pass"

    def text(self) -> str:
        """Return the comparison as lines."""
        lines = [f"{'measure':<22} {'before':>10} {'after':>10} {'ratio, 95 %':>16}  verdict"]
        for one in self.findings:
            span = f"{one.low:.3f}..{one.high:.3f}"
            lines.append(f"{one.measure:<22} {one.before:>10.4g} {one.after:>10.4g} {span:>16}  {one.verdict}")
        if self.why_no_texts is not None:
            lines.append(f"texts were not compared: {self.why_no_texts}")
        else:
            shown = ", ".join(map(str, self.differing[:10]))
            lines.append(f"texts: {len(self.differing)} of {self.n_texts} differ" + (f": {shown}" if shown else ""))
        lines.append(f"failed requests: {self.n_failed[0]} before, {self.n_failed[1]} after")
        return "\n".join([*lines, f"verdict: {self.verdict}"])


def load(path: Path) -> dict[str, Any]:
    """Read a result of `bench serve`.

    Raises: ConfigError: it is none.
    """
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: {path.name}: {error}; need a result of `tiercel bench serve`") from None
    missing = [name for name in (*_LISTS, "duration", "config") if not isinstance(told, dict) or name not in told]
    if missing or len({len(told[name]) for name in _LISTS}) != 1:
        raise ConfigError(f"compare: {path.name}: is no result of `tiercel bench serve` (lacks {', '.join(missing)})")
    return told


def compare(before: Mapping[str, Any], after: Mapping[str, Any], *, tolerance_frac: float = 0.05) -> Comparison:
    """Compare two results.

    Raises: ConfigError: the tolerance is out of its range.
    """
    import numpy as np

    if not 0 <= tolerance_frac < 1:
        raise ConfigError(f"compare: tolerance: got {tolerance_frac:g}; need 0 up to 1, as in 0.05")
    findings = []
    for name, unit in (("ttfts", "ttft"), ("tpots", "tpot"), ("e2els", "e2el")):
        a, b = _values(before, name), _values(after, name)
        if len(a) < 2 or len(b) < 2:
            continue
        for part, take in (("median", _median), ("p99", _p99)):
            findings.append(_judge(f"{part}_{unit}_ms", 1e3 * a, 1e3 * b, take, tolerance_frac, is_less_better=True))
    rate_a, rate_b = _slice_rates(before), _slice_rates(after)
    if np.sum(rate_a) > 0 and np.sum(rate_b) > 0:
        findings.append(_judge("output_tok_s", rate_a, rate_b, _mean, tolerance_frac, is_less_better=False))
    why = _why_no_texts(before, after)
    done = [
        i
        for i in range(len(before["errors"]) if why is None else 0)
        if not before["errors"][i] and not after["errors"][i]
    ]
    differing = [i for i in done if before["generated_texts"][i] != after["generated_texts"][i]]
    n_failed = (sum(map(bool, before["errors"])), sum(map(bool, after["errors"])))
    return Comparison(findings, len(done), differing, why, n_failed)


def _judge(
    measure: str,
    before: "np.ndarray",
    after: "np.ndarray",
    take: "Callable[[np.ndarray], np.ndarray]",
    tolerance_frac: float,
    *,
    is_less_better: bool,
) -> Finding:
    import numpy as np

    source = np.random.default_rng(0)
    drawn = []
    for values in (before, after):
        picks = source.integers(0, len(values), (_N_DRAWS, len(values)))
        drawn.append(take(values[picks]))
    ratio = drawn[1] / np.maximum(drawn[0], 1e-12)
    low, high = (float(bound) for bound in np.percentile(ratio, (2.5, 97.5)))
    if low > 1 + tolerance_frac:
        verdict = "worse" if is_less_better else "better"
    elif high < 1 - tolerance_frac:
        verdict = "better" if is_less_better else "worse"
    elif low >= 1 - tolerance_frac and high <= 1 + tolerance_frac:
        verdict = "same"
    elif (high <= 1 + tolerance_frac) if is_less_better else (low >= 1 - tolerance_frac):
        verdict = "no worse"
    else:
        verdict = "unclear"
    one = [float(take(values[None])[0]) for values in (before, after)]
    return Finding(measure, one[0], one[1], low, high, verdict)


def _median(drawn: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.asarray(np.median(drawn, axis=1))


def _p99(drawn: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.asarray(np.percentile(drawn, 99, axis=1))


def _mean(drawn: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.asarray(np.mean(drawn, axis=1))


def _values(told: Mapping[str, Any], name: str) -> "np.ndarray":
    import numpy as np

    kept = [value for value, error in zip(told[name], told["errors"], strict=True) if not error and value is not None]
    return np.array(kept, np.float64)


def _slice_rates(told: Mapping[str, Any]) -> "np.ndarray":
    """Return the output rate in each of equal slices of the run; a request's tokens are spread evenly over its time."""
    import numpy as np

    edges = np.linspace(0.0, told["duration"], _N_SLICES + 1)
    tokens = np.zeros(_N_SLICES)
    for start, ttft, e2el, n, error in zip(
        told["starts"], told["ttfts"], told["e2els"], told["output_lens"], told["errors"], strict=True
    ):
        if error or ttft is None:
            continue
        begin, end = start + ttft, max(start + e2el, start + ttft + 1e-9)
        part = np.clip(edges, begin, end)
        tokens += n * np.diff(part) / (end - begin)
    # Without the slices in which the load is still growing, or ends.
    return np.asarray(tokens / np.diff(edges))[2:-2]


def _why_no_texts(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    configs = before["config"], after["config"]
    try:
        if any(config["load"]["temperature"] != 0 for config in configs):
            return "they were sampled, not greedy"
        if configs[0]["prompts_digest"] != configs[1]["prompts_digest"]:
            return "the two runs had different prompts"
    except (KeyError, TypeError):
        return "a run does not say what it sent"
    return None
