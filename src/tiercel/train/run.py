"""A run from end to end: texts, taps, training, measuring, and the folder that is left. Each part goes on where it was.

Read next: `texts`, `taps`, `trainer`, `walk`. torch is imported here and below, after `require_torch` said it is there.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercel.base import machine
from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError
from tiercel.train.options import TrainOptions
from tiercel.train.progress import WorkProgress
from tiercel.train.shape import CONV_GROUP, DraftShape, Kind
from tiercel.train.store import open_folder, write_text
from tiercel.train.taps import TapFiles, TapRunner, record_taps
from tiercel.train.target import DraftSizes, Target
from tiercel.train.texts import Conversation, TextOptions, distinct, make_texts, n_answer_tokens, read_prompts

if TYPE_CHECKING:
    from tiercel.boot.plan import Plan
    from tiercel.llm.llm import LLM

N_STREAMS = 64  # texts that are written at once
_STEP_TOKENS = 2048
_TOPK: Mapping[str, int] = {"dspark": 64, "dflash2": 16, "eagle3": 0}
_N_LAYERS: Mapping[str, int] = {"dspark": 2, "dflash2": 2, "eagle3": 1}
_N_RMS_ROWS = 10_000  # that the taps' sizes are measured on
_RANK = 64  # a quarter of large drafters'
_N_FIRST = 4  # tokens of a text whose streams are unlike all others
_N_LOOKED_AT = 12  # texts that are walked through while training


@dataclass(frozen=True)
class Corpus:
    """Texts and what the target computed of them. `learned` are those to learn from, `held_out` those to measure on."""

    learned: Sequence[Conversation]
    held_out: Sequence[Conversation]
    files: TapFiles


def require_torch() -> None:
    """See that torch is there, before anything is begun.

    Raises: ConfigError: it is not; the message names the extra.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("train-drafter: torch is not installed; it is in an extra: pip install 'tiercel[train]'")


def train_drafter(target: str | None, kind: Kind, out: Path, options: TrainOptions, command: str) -> dict[str, Any]:
    """Make a drafter of `kind` for `target` in the folder `out`; return what it is worth.

    Raises:
        ConfigError: torch is missing, the folder was begun with other options, or an option does not fit the target.
        UnsupportedModel: the target's layers cannot be tapped.
        TrainingFailed: the loss is no number any more.
        TiercelError: there is no room on the disk.
    """
    require_torch()
    import torch

    from tiercel.boot.plan import make_plan

    _device(options.device, torch.cuda.is_available())
    given = read_prompts(Path(options.prompts).expanduser()) if options.prompts is not None else ()
    engine = _engine_options(target, options)
    plan = make_plan(engine)
    with plan.checkpoint:
        facts = Target(plan)
        digest = plan.checkpoint.digest()
        sizes = _sizes(kind, options)
        shape = facts.shape(sizes, embedding_scale=round(float(1.0 / facts.embedding().std()), 4))
        _check(shape, options)
        texts = _text_options(options, given)
        open_folder(out, "drafter", {"target_digest": digest, "drafter": kind, **_identity(options, texts, shape)})
        data = Path(options.data).expanduser() if options.data is not None else out / "data"
        open_folder(data, "data", {"target_digest": digest, **texts.identity()})
        corpus = prepare(engine, plan, data, texts, shape)
        return _train(facts, shape, corpus, out, options, _told(plan, facts, kind, texts, options, command))


def prepare(engine: EngineOptions, plan: "Plan", data: Path, texts: TextOptions, shape: DraftShape) -> Corpus:
    """Have the texts written and the taps recorded, as far as they are not."""

    def make_llm() -> "LLM":
        from tiercel.llm.llm import LLM

        return LLM(**{name: value for name, value in asdict(engine).items() if value != getattr(EngineOptions(), name)})

    with WorkProgress("texts", texts.n_answer_tokens) as bar:
        shards = make_texts(make_llm, data, texts, bar.at)
    width = (len(shape.taps) + 1) * shape.hidden
    folder = data / ("taps-" + "-".join(str(i) for i in shape.taps))
    open_folder(folder, "taps", {"taps": list(shape.taps), "width": width})
    with WorkProgress("taps", len(shards)) as bar:
        record_taps(lambda: TapRunner(plan, shape.taps), folder, shards, width, bar.at)
    files = TapFiles(folder, shards, n_taps=len(shape.taps), hidden=shape.hidden)
    kept = distinct([one for shard in shards for one in shard])
    held_out = [one for one in kept if one.is_held_out and one.is_greedy]
    return Corpus([one for one in kept if not one.is_held_out], held_out, files)


def tap_rms(corpus: Corpus, width: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return the root mean square of each column of the joined taps, float32 [width], over the first texts' tokens."""
    total, n_rows = np.zeros(width), 0
    for text in corpus.learned:
        rows = corpus.files.rows(text)[_N_FIRST:, :width].astype(np.float64)
        total += (rows**2).sum(0)
        n_rows += len(rows)
        if n_rows >= _N_RMS_ROWS:
            break
    return np.maximum(np.sqrt(total / max(n_rows, 1)), 1e-3).astype(np.float32)


def _train(
    target: Target, shape: DraftShape, corpus: Corpus, out: Path, options: TrainOptions, told: dict[str, Any]
) -> dict[str, Any]:
    import torch

    from tiercel.train import state as states
    from tiercel.train.batches import Sampler, gather
    from tiercel.train.drafter import Drafter
    from tiercel.train.export import published_tensors, write_checkpoint
    from tiercel.train.heads import Vocabulary
    from tiercel.train.measure import look, measure
    from tiercel.train.report import write_report
    from tiercel.train.start import first_tensors
    from tiercel.train.trainer import Budget, Trainer
    from tiercel.train.vocabulary import Before, count_tokens, coverage, draft_ids

    n_threads = options.threads or machine.usable_cpus()
    torch.set_num_threads(n_threads)
    device = _device(options.device, torch.cuda.is_available())
    precision = options.precision if options.precision != "auto" else _best_precision(device)
    counts = count_tokens(corpus.learned, shape.vocab)
    ids, before, rms = draft_ids(counts, shape.draft_vocab), Before(counts), tap_rms(corpus, shape.context_width)
    drafter = Drafter(
        shape,
        Vocabulary.of(target.embedding(), target.head(), ids, before.row_of, target.softcap, device),
        torch.from_numpy(rms).to(device),
        is_mixed=precision == "bfloat16",
    )
    first = first_tensors(target, shape, rms, before.n_rows, options.seed)
    state = states.load(out, {name: one.shape for name, one in first.items()})
    if state is None:
        state = states.TrainState(step=0, spent_s=0.0, params=first, first={}, second={})
    budget = Budget(
        n_steps=options.steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        save_every_s=60.0 * options.save_minutes,
    )
    sampler = Sampler(corpus.learned, n_texts=options.texts_a_step, n_anchors=options.anchors, seed=options.seed)
    trainer = Trainer(drafter, state, budget, device)
    seen = list(corpus.held_out[:_N_LOOKED_AT])
    with WorkProgress("training", 1.0) as bar:
        state = trainer.run(
            lambda step: gather(*sampler.choose(step), corpus.files, shape.n_slots),
            lambda one: look(drafter, one.params, seen, corpus.files),
            lambda one: states.save(out, one),
            bar.at,
        )
    tensors = published_tensors(state.params, shape, rms, before, ids)
    # What is measured is what is written: halves, not the floats that were trained.
    with torch.no_grad():
        for param in trainer.params.values():
            param.copy_(param.half().float())
    found = measure(drafter, trainer.params, corpus.held_out, corpus.files)
    told |= {
        "shape": asdict(shape),
        "n_texts": len(corpus.learned),
        "n_answer_tokens": n_answer_tokens(corpus.learned),
        "coverage": round(coverage(counts, ids), 4),
        "n_parameters": sum(int(np.prod(one)) for one in shape.shapes().values()),
        "n_steps": state.step,
        "spent_s": round(state.spent_s, 1),
        "history": state.history,
        "device": device,
        "precision": precision,
        "threads": n_threads,
        "torch": torch.__version__,
        "confidence_temperatures": found["confidence"]["temperatures"],
    }
    write_checkpoint(out, tensors, shape, {name: one for name, one in told.items() if name != "history"})
    write_text(out / "results.json", _json({"training": told, "found": found}))
    write_report(out, told, found)
    return found


def _engine_options(target: str | None, options: TrainOptions) -> EngineOptions:
    return EngineOptions(
        model=target,
        threads=options.threads,
        max_model_len=options.max_len + 16,
        max_num_seqs=N_STREAMS,
        max_num_batched_tokens=max(_STEP_TOKENS, options.max_len),
        speculative="off",
    )


def _text_options(options: TrainOptions, given: tuple[str, ...]) -> TextOptions:
    return TextOptions(
        n_answer_tokens=options.tokens,
        n_held_out=options.held_out,
        max_len_tokens=options.max_len,
        temperature=options.temperature,
        top_p=options.top_p,
        greedy_frac=options.greedy_frac,
        seed=options.seed,
        prompts=given,
    )


def _sizes(kind: Kind, options: TrainOptions) -> DraftSizes:
    return DraftSizes(
        kind=kind,
        n_layers=options.layers or _N_LAYERS[kind],
        n_slots=options.draft_tokens,
        rank=options.rank or _RANK,
        topk=min(_TOPK[kind] if options.topk is None else options.topk, options.draft_vocab),
        draft_vocab=options.draft_vocab,
        taps=options.taps or (),
    )


def _check(shape: DraftShape, options: TrainOptions) -> None:
    if shape.draft_vocab > shape.vocab:
        raise ConfigError(f"draft_vocab: got {shape.draft_vocab}; the target has {shape.vocab} tokens; lower it")
    if shape.kind == "dflash2" and shape.topk < 2:
        raise ConfigError(f"topk: got {shape.topk}; dflash2 chooses among 2 candidates or more; 16 is usual")
    if shape.kind == "eagle3" and shape.topk:
        raise ConfigError(f"topk: got {shape.topk}; eagle3 drafts its likeliest token; leave it out")
    if options.topk is not None and options.topk > shape.draft_vocab:
        raise ConfigError(f"topk: got {options.topk}; {shape.draft_vocab} tokens can be drafted; lower it")
    if shape.kind == "eagle3" and options.rank is not None:
        raise ConfigError(f"rank: got {options.rank}; eagle3 has no table by the token before; leave it out")
    if shape.kind == "eagle3" and shape.n_layers != 1:
        raise ConfigError(f"layers: got {shape.n_layers}; an eagle3 drafter has one layer; leave it out")
    if shape.kind == "dflash2" and shape.hidden % CONV_GROUP:
        raise ConfigError(
            f"kind: dflash2 has convolutions over groups of {CONV_GROUP} columns, and the target has {shape.hidden}; "
            "choose dspark or eagle3"
        )


def _identity(options: TrainOptions, texts: TextOptions, shape: DraftShape) -> dict[str, Any]:
    """Return what a folder must have been begun with to be gone on with: all but how long, where and how often."""
    free = ("minutes", "steps", "save_minutes", "device", "precision", "threads", "data", "prompts", "taps")
    return {
        **{name: value for name, value in asdict(options).items() if name not in free},
        "prompts_sha256": texts.identity()["prompts_sha256"],
        "taps": list(shape.taps),
    }


def _told(
    plan: "Plan", target: Target, kind: Kind, texts: TextOptions, options: TrainOptions, command: str
) -> dict[str, Any]:
    licence = plan.checkpoint.metadata.get("general.license") if plan.checkpoint.kind == "gguf" else None
    return {
        "kind": kind,
        "target": target.name,
        "target_digest": plan.checkpoint.digest(),
        "licence": licence if isinstance(licence, str) else "other",
        "texts": {name: value for name, value in texts.identity().items() if value is not None},
        "n_given": len(texts.prompts),
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "texts_a_step": options.texts_a_step,
        "anchors": options.anchors,
        "command": command,
    }


def _device(wanted: str, has_cuda: bool) -> str:
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("device: got cuda; torch finds no GPU here; use auto or cpu")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def _best_precision(device: str) -> str:
    import torch

    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    # Processors without these instructions compute bfloat16 slower than float32.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bfloat16" if any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"


def _json(value: object) -> str:
    import json

    return json.dumps(value, indent=2) + "\n"
