"""Speculation against the same engine without it: tokens a second, the two taking turns, on work that repeats and that
does not.

    python benchmarks/speculation.py MODEL [CASE...] [--output-len N] [--config JSON]

Cases: edit (a text of some 600 tokens is to be written again with one name changed), extract (a list becomes JSON),
chat (open questions), batch (eight open questions at once). Each prompt is used once by each engine, in turns; what
they answer is compared before times are. Traps: a small model does not follow such instructions well, but what it
writes repeats the text all the same; recent answers help the next one, as they would in use, so the first prompt of a
case is told apart.
"""

import argparse
import json
import statistics
import time

from tiercel import LLM, SamplingParams

PLACES = ("Marlow", "Tessin", "Odense", "Kirkby", "Valdor", "Ruhpol", "Lisle", "Bergen")
GOODS = ("timber", "wool", "copper", "salt", "grain", "glass", "paper", "linen", "cider", "slate")
NAMES = ("Anna", "Bert", "Carla", "Dirk", "Eva", "Finn", "Greta", "Hugo", "Ida", "Jonas")
TRADES = ("baker", "carpenter", "doctor", "farmer", "glazier", "lawyer", "miller", "nurse", "painter", "teacher")
QUESTIONS = (
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
)


def a_text(i: int) -> str:
    """Make some 600 tokens, others for each i."""
    lines = []
    for k in range(15):
        place, other = PLACES[(i + k) % 8], PLACES[(i + 3 * k + 1) % 8]
        good, more = GOODS[(3 * i + k) % 10], GOODS[(i + 7 * k + 2) % 10]
        name, trade = NAMES[(i + 2 * k) % 10], TRADES[(5 * i + 3 * k) % 10]
        when, much = 1700 + 13 * i + 9 * k, 20 + 7 * k + i
        lines.append(
            f"In the year {when} the {trade} {name} of {place} sold {much} crates of {good} to a merchant from "
            f"{other}, who paid with {more} and promised to return before the winter."
        )
    return " ".join(lines)


def prompts_of(case: str, n: int) -> list[list[str]]:
    """Give what is asked, a list at a time."""
    if case == "edit":
        ask = "Write the following text again, word for word, but change the name {} to Peter everywhere.\n\n{}"
        return [[ask.format(NAMES[i % 10], a_text(i))] for i in range(n)]
    if case == "extract":
        rows = [
            "\n".join(
                f"{NAMES[(i + k) % 10]} is a {TRADES[(3 * i + k) % 10]} in {PLACES[(i + 5 * k) % 8]}." for k in range(9)
            )
            for i in range(n)
        ]
        ask = 'Turn each line into a JSON object like {"name": "Max", "trade": "cook", "town": "Ulm"}, one a line.\n\n'
        return [[ask + one] for one in rows]
    if case == "chat":
        return [[QUESTIONS[i % 10]] for i in range(n)]
    return [[QUESTIONS[(i + k) % 10] for k in range(8)] for i in range(n)]


def timed(
    llm: LLM, prompts: list[str], n_tokens: int, temperature: float, seed: int = 0
) -> tuple[float, list[list[int]]]:
    """Answer; give tokens a second and the tokens. The prompts are computed before, and found in the prefix cache."""
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=n_tokens, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.chat(asked, params, use_tqdm=False)
    took_s = time.perf_counter() - begun
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, ids)) / took_s, ids


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("cases", nargs="*", default=["edit", "extract", "chat"])
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--config", type=json.loads, default={})
    args = parser.parse_args()
    with LLM(args.model, speculative="off") as plain, LLM(args.model, speculative_config=args.config) as drafting:
        for llm in (plain, drafting):
            timed(llm, ["Hello"], 16, 0.0)
        for case in args.cases:
            ratios, rates, before = [], [], drafting.stats()
            for i, prompts in enumerate(prompts_of(case, args.rounds)):
                order = (plain, drafting) if i % 2 else (drafting, plain)
                got = {llm: timed(llm, prompts, args.output_len, args.temperature, i) for llm in order}
                assert got[plain][1] == got[drafting][1], f"{case} {i}: the answers differ"
                ratios.append(got[drafting][0] / got[plain][0])
                rates.append((got[plain][0], got[drafting][0]))
            now = drafting.stats()
            drafted, accepted, n_steps = (
                now.get(k, 0) - before.get(k, 0) for k in ("n_draft_tokens", "n_accepted_tokens", "n_total_steps")
            )
            off, on = (statistics.median(column) for column in zip(*rates, strict=True))
            spread = f"first {ratios[0]:.2f}, min {min(ratios):.3f}, max {max(ratios):.3f}"
            print(f"{case}: {off:.0f} -> {on:.0f} tokens/s, ratio median {statistics.median(ratios):.3f} ({spread});")
            n_tokens = args.rounds * len(prompts) * args.output_len
            print(f"  {n_tokens} tokens in {n_steps} steps, {accepted} of {drafted} drafts accepted", flush=True)


if __name__ == "__main__":
    main()
