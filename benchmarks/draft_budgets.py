"""Whether the rows that are chosen step by step are the right ones: a drafter's confidences and measured costs against
fixed numbers of drafts, and against none, at several loads: a row each in benchmarks/results/draft_budgets.jsonl.

    python benchmarks/draft_budgets.py TARGET DRAFTER [STREAMS...]

TARGET and DRAFTER are paths or names; STREAMS are numbers of streams that decode at once (default: 1 4 8 16 32).
Contestants are engines of the same model: `tiercel` chooses, `fixed-K` computes K drafts whatever they bring (1, 2 and
all that the drafter makes), `off` has no drafter. In each round all of them answer the same new open questions, in an
order that changes, and must give the same tokens. `stream_tok_s` is the sum of the streams' own rates.
"""

import contextlib
import statistics
import sys
from typing import Any

from keeping import command_of, keep_row

from tiercel import LLM
from tiercel.bench.contest import Request
from tiercel.bench.offline import Told
from tiercel.bench.ours import OurEngine
from tiercel.bench.speculative import decode_measures
from tiercel.bench.texts import question

N_OUT = 128
N_WARMUPS = 2
N_TOKENS, N_ROUNDS_MIN = 2000, 20  # of a load, of each contestant
MEASURE = "stream_tok_s"


def configs(drafter: str) -> dict[str, dict[str, Any]]:
    """Return each contestant's options."""
    found: dict[str, dict[str, Any]] = {
        "tiercel": {"speculative_config": {"model": drafter}},
        "off": {"speculative": "off"},
    }
    for name, more in (("fixed-1", 1), ("fixed-2", 2), ("fixed-all", None)):
        number = {} if more is None else {"num_speculative_tokens": more}
        found[name] = {"speculative_config": {"model": drafter, "adaptive": False, **number}}
    return found


def compare(engines: dict[str, OurEngine], n_streams: int) -> dict[str, dict[str, list[float]]]:
    """Let all answer, round by round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    names = list(engines)
    n_rounds = max(N_ROUNDS_MIN, N_TOKENS // (N_OUT * n_streams))
    for i in range(N_WARMUPS + n_rounds):
        first = 1000 * n_streams + i * n_streams
        requests = [Request(tuple(engines["off"].ask(question("chat", first + k))), N_OUT) for k in range(n_streams)]
        answers = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run = engines[name].generate(requests)
            answers[name] = run.token_ids
            if i >= N_WARMUPS:
                for measure, value in decode_measures(run).items():
                    found[name].setdefault(measure, []).append(value)
        assert len(set(answers.values())) == 1, "speculation changed an answer; report this"
    return found


def main() -> None:
    """Compare at each load that the command line names."""
    target, drafter, *loads = sys.argv[1:]
    with contextlib.ExitStack() as open_:
        engines = {}
        for name, options in configs(drafter).items():
            llm = LLM(target, enable_prefix_caching=False, max_model_len=2048, kv_cache_memory_bytes=1 << 29, **options)
            engines[name] = OurEngine(llm)
            open_.callback(llm.close)
        for n_streams in [int(n) for n in loads] or [1, 4, 8, 16, 32]:
            found = compare(engines, n_streams)
            others = {name: statistics.median(one[MEASURE]) for name, one in found.items() if name != "tiercel"}
            best = max(others, key=lambda name: others[name])
            found["tiercel"]["of_best_frac"] = [
                ours / other for ours, other in zip(found["tiercel"][MEASURE], found[best][MEASURE], strict=True)
            ]
            work = {"text": "chat", "num_prompts": n_streams, "output_len": N_OUT, "best": best}
            told = Told(
                case=f"draft-budgets-{n_streams}",
                bench="draft_budgets",
                command=command_of(),
                reach=[{"measure": "of_best_frac", "at_least": 0.97}],
            )
            keep_row(told, work, found, "all tokens are those without a drafter")


if __name__ == "__main__":
    main()
