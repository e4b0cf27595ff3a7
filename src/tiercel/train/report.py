"""A finished run in words and pictures: `report/report.md`, and the card `README.md` beside the weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.bench.plot import lines
from tiercel.train.store import write_text

_WHAT = {
    "dspark": "a DSpark drafter: all drafts in one pass, then a bias by the token before, and a confidence",
    "dflash2": "a DFlash2 drafter: all drafts in one pass with short convolutions, then a walk over candidates",
    "eagle3": "an EAGLE-3 drafter: one draft a pass, each pass on its own output",
}


def write_report(folder: Path, training: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write the report and its pictures to `folder`/report, and the card to `folder`.

    `training` says how the drafter was made, `found` what `measure` gave.

    Raises: TiercelError: there is no room.
    """
    to = folder / "report"
    to.mkdir(exist_ok=True)
    for name, picture in pictures(training, found).items():
        write_text(to / f"{name}.svg", picture)
    write_text(to / "report.md", report(training, found))
    write_text(folder / "README.md", card(training, found))


def pictures(training: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return the report's pictures, as SVG text, by name."""
    history = training["history"]
    minutes = [one["spent_s"] / 60 for one in history]
    slots = [float(k + 1) for k in range(len(found["survival"]))]
    tokens = [float(one) for one in found["tokens_a_step"].values()]
    confidence = found["confidence"]
    return {
        "learning": lines(
            "Tokens a step while it learned",
            [("greedy", minutes, [one["tokens_a_step"] for one in history])],
            "minutes of training",
        ),
        "survival": lines(
            "How often a draft and all before it come",
            [("greedy", slots, found["survival"])],
            "draft",
        ),
        "tokens": lines("Tokens a step by the drafts made", [("greedy", slots, tokens)], "drafts a step"),
        "confidence": lines(
            "Error of the confidence that a draft comes",
            [
                ("as trained", slots, confidence["error_before"]),
                ("with a temperature a slot", slots, confidence["error_after"]),
            ],
            "draft",
        ),
    }


def report(training: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the report, as Markdown."""
    low, high = found["tokens_a_step_95"]
    rows = [
        f"| {k + 1} | {tokens:.2f} | {survival:.3f} | {overlap:.3f} | {t:.2f} |"
        for k, (tokens, survival, overlap, t) in enumerate(
            zip(
                found["tokens_a_step"].values(),
                found["survival"],
                found["overlap"],
                found["confidence"]["temperatures"],
                strict=True,
            )
        )
    ]
    best = max(found["tokens_a_step"].values())
    ngram = ", ".join(f"{tokens:.2f} (from {n} tokens on)" for n, tokens in found["ngram_tokens_a_step"].items())
    return "\n".join(
        [
            f"# {training['kind']} for {training['target']}",
            "",
            f"Walked through {found['n_texts']} greedy answers that were not learned from ({found['n_tokens']:,} "
            f"tokens): **{best:.2f} tokens a step** (95 % of resampled texts: {low:.2f} to {high:.2f}). Prompt lookup "
            f"on the same texts: {ngram}.",
            "",
            "| drafts | tokens a step | comes | overlap | temperature of its confidence |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "*Comes*: the part of steps in which this draft and all before it were the target's. *Overlap*: how much "
            "of the target's distribution the drafter's has, the target's own tokens before it (1 less their total "
            "variation). Temperatures were fitted on half of the texts; the picture shows the error on the others.",
            "",
            *(f"![{name}]({name}.svg)\n" for name in pictures(training, found)),
            "## How it was made",
            "",
            *_facts(training),
            "",
        ]
    )


def card(training: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the card, as Markdown."""
    best = max(found["tokens_a_step"].values())
    return "\n".join(
        [
            "---",
            f"license: {training['licence']}",
            "tags: [speculative-decoding, drafter]",
            "---",
            "",
            f"# {training['kind']} drafter for {training['target']}",
            "",
            f"This is {_WHAT[training['kind']]}. It foretells tokens of **{training['target']}** and of no other; "
            "what that model answers stays the same, bit for bit, and comes sooner where the drafts are right.",
            "",
            f"On {found['n_texts']} greedy answers held out: {best:.2f} tokens a step "
            f"({found['survival'][0]:.0%} of first drafts come). `report/report.md` has the rest.",
            "",
            "## Data and training",
            "",
            *_facts(training),
            "",
            "All texts were written by the target itself; what it gets wrong is in them. The drafter says nothing by "
            "itself, and adds no knowledge or bias to the target's answers. Its licence is that of the target, whose "
            "weights it began from.",
            "",
            "Make it again with:",
            "",
            "```",
            str(training["command"]),
            "```",
            "",
        ]
    )


def _facts(training: Mapping[str, Any]) -> list[str]:
    shape = training["shape"]
    greedy, temperature = training["texts"]["greedy_frac"], training["texts"]["temperature"]
    return [
        f"- target: {training['target']}, digest `{training['target_digest'][:16]}`",
        f"- texts: {training['n_answer_tokens']:,} tokens of answers in {training['n_texts']:,} conversations, "
        f"{greedy:.0%} of them greedy, the others at temperature {temperature:g}; "
        f"{training['n_given']:,} questions given, the others the target's own",
        f"- drafter: {training['n_parameters']:,} parameters trained, {shape['n_layers']} layer"
        f"{'s' if shape['n_layers'] > 1 else ''}, taps {list(shape['taps'])}, {shape['draft_vocab']:,} tokens that can "
        f"be drafted ({training['coverage']:.1%} of what is said), rank {shape['rank']}",
        f"- training: {training['n_steps']:,} steps in {training['spent_s'] / 60:.0f} minutes on "
        f"{training['device']} ({training['threads']} threads, {training['precision']}), seed {training['seed']}, "
        f"learning rate {training['learning_rate']:g}; torch {training['torch']}",
    ]
