"""A drafter in training: what it writes is what it computed, and its run is a function of the seed. Needs torch."""

import json
import os
import signal
from dataclasses import replace

import draft_definitions as definitions
import numpy as np
import pytest
from safetensors.numpy import load_file

from tiercel.base.errors import TrainingFailed
from tiercel.train.batches import Sampler, gather
from tiercel.train.export import published_tensors, write_checkpoint
from tiercel.train.shape import DraftShape
from tiercel.train.taps import TapFiles
from tiercel.train.texts import Conversation
from tiercel.train.vocabulary import Before, count_tokens, draft_ids

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")

from tiercel.train.drafter import Drafter  # noqa: E402 what they need is looked for first
from tiercel.train.heads import Vocabulary, divergence  # noqa: E402
from tiercel.train.measure import draft_texts, measure  # noqa: E402
from tiercel.train.state import TrainState, load, save  # noqa: E402
from tiercel.train.trainer import Budget, Trainer  # noqa: E402

V, E, N_TAPS = 48, 32, 2
KINDS = ("dspark", "dflash2", "eagle3")


def shape_of(kind, **changes):
    made = DraftShape(
        kind=kind,
        vocab=V,
        draft_vocab=24,
        hidden=E,
        ffn=40,
        n_layers=1 if kind == "eagle3" else 2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        eps=1e-5,
        act="silu",
        rope_theta=10000.0,
        max_position=256,
        taps=(0, 2),
        n_slots=4,
        rank=8,
        topk={"dspark": 5, "dflash2": 6, "eagle3": 0}[kind],
        embedding_scale=2.5,
    )
    return replace(made, **changes)


class Case:
    """Made-up texts with made-up taps, and a drafter of random numbers."""

    def __init__(self, kind, folder, **changes):
        rng = np.random.default_rng(7)
        self.shape = shape_of(kind, **changes)
        self.texts, rows = [], []
        self.embedding, self.head = (rng.standard_normal((V, E)).astype(np.float32) * 0.4 for _ in range(2))
        for i, n in enumerate((30, 26, 34, 21, 40, 28)):
            # Something to learn: each token follows from the one before, most of the time.
            ids = np.cumsum(rng.choice([1, 1, 1, 5], n)) % V
            begin = sum(len(one.token_ids) for one in self.texts)
            self.texts.append(Conversation(ids.astype(np.int32), 6, True, i >= 4, 0, begin))
            taps = rng.standard_normal((n, N_TAPS * E)) * np.repeat([3.0, 40.0], E)
            # The target's last row says the text's next token.
            rows.append(np.concatenate([taps, 1.5 * self.head[np.roll(ids, -1)]], axis=1))
        np.save(folder / "taps-00000.npy", np.concatenate(rows).astype(np.float16))
        self.files = TapFiles(folder, [self.texts], n_taps=N_TAPS, hidden=E)
        self.learned, self.held_out = self.texts[:4], self.texts[4:]
        counts = count_tokens(self.learned, V)
        self.ids, self.before = draft_ids(counts, self.shape.draft_vocab), Before(counts)
        # Powers of two: what is written of fc, in halves and divided by them, is what was trained.
        self.rms = np.repeat(np.float32([4.0, 32.0]), E)
        vocabulary = Vocabulary.of(self.embedding, self.head, self.ids, self.before.row_of, 0.0, "cpu")
        self.drafter = Drafter(self.shape, vocabulary, torch.from_numpy(self.rms))
        tables = ("markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook")
        self.first = {}
        for name, extents in self.shape.shapes().items():
            extents = (self.before.n_rows, extents[1]) if name in tables else extents
            drawn = rng.standard_normal(extents).astype(np.float32)
            is_norm = name.endswith(("norm.weight", "base_kernel"))
            scale = 0.2 if is_norm or len(extents) == 1 else 0.5 if "head" in name or "selector" in name else None
            drawn *= scale or extents[-1] ** -0.5
            # Halves are what is written: a drafter of other numbers would not be the one that is read.
            self.first[name] = (drawn + is_norm).astype(np.float16).astype(np.float32)

    def params(self):
        return {name: torch.from_numpy(one.copy()) for name, one in self.first.items()}

    def batch(self, step=0):
        sampler = Sampler(self.learned, n_texts=2, n_anchors=5, seed=0)
        return gather(*sampler.choose(step), self.files, self.shape.n_slots)

    def trainer(self, state=None, **budget):
        begun = TrainState(step=0, spent_s=0.0, params=self.first, first={}, second={})
        usual = {"n_steps": 12, "minutes": 1.0, "learning_rate": 5e-3, "n_warmup": 2}
        return Trainer(self.drafter, state or begun, Budget(**{**usual, **budget}), "cpu")


@pytest.fixture(params=KINDS)
def case(request, tmp_path):
    torch.set_num_threads(1)
    return Case(request.param, tmp_path)


def run(trainer, case, saved=None, *, batch_of=None, on_step=None):
    states = [] if saved is None else saved
    return trainer.run(
        batch_of or case.batch, lambda _: {}, states.append, on_step or (lambda *_: None), clock=lambda: 0.0
    )


def test_products_of_bfloat16_give_nearly_the_loss_and_the_gradient(case):
    losses, gradients = [], []
    for is_mixed in (False, True):
        drafter = Drafter(case.shape, case.drafter.vocabulary, torch.from_numpy(case.rms), is_mixed=is_mixed)
        params = {name: one.requires_grad_() for name, one in case.params().items()}
        loss = drafter.loss(params, drafter.tensors(case.batch())).total
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: param.grad.flatten() for name, param in params.items()})
    assert losses[0] != losses[1], "nothing was rounded"
    assert abs(losses[0] - losses[1]) < 0.01 * losses[0]
    for name, exact in gradients[0].items():
        rounded = gradients[1][name]
        assert rounded.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.98, name


def test_what_is_written_drafts_as_the_trainer_does(case, tmp_path):
    """By a definition in numpy that reads the published files: taps, tables, vocabulary and layout are all in it."""
    folder = tmp_path / "out"
    folder.mkdir()
    tensors = published_tensors(case.first, case.shape, case.rms, case.before, case.ids)
    write_checkpoint(folder, tensors, case.shape, {"target_digest": "abc"})
    config = json.loads((folder / "config.json").read_text())
    kind = definitions.Chain if case.shape.kind == "eagle3" else definitions.Block
    published = kind(load_file(folder / "model.safetensors"), config, case.embedding, case.head)
    said = set()
    for drafted in draft_texts(case.drafter, case.params(), case.held_out, case.files):
        ids, start = drafted.text.token_ids, drafted.text.answer_start
        taps = case.files.rows(drafted.text)[:, : N_TAPS * E].astype(np.float64)
        for row in range(0, len(drafted.tokens), 5):
            at = start + row
            if case.shape.kind == "eagle3":
                tokens, chances = published.drafts(taps[:at], at, ids, case.shape.n_slots)
            else:
                tokens, chances = published.drafts(taps[:at], at, ids[at])
            assert drafted.tokens[row].tolist() == tokens
            found = 1 / (1 + np.exp(-drafted.confidences[row]))
            assert np.abs(found - chances).max() < 1e-4
            said.update(tokens)
    assert len(said) > 5


def test_a_loss_is_what_a_slot_alone_would_give(case):
    """Slots are weighted by exp(-k / 4), those behind the text's end by nothing."""
    batch = case.batch()
    params = case.params()
    tensors = case.drafter.tensors(batch)
    whole = case.drafter.loss(params, tensors)
    behind = tensors.is_valid.logical_not()
    assert behind.any()
    changed = tensors._replace(tokens=tensors.tokens.clone(), teacher=tensors.teacher.clone())
    changed.tokens[:, :, 1:][behind] = 3
    changed.teacher[behind] = 7.0
    assert torch.equal(whole.total, case.drafter.loss(params, changed).total)
    assert 0.0 < float(whole.first_overlap) < 1.0


def test_the_gradient_of_the_loss_is_that_of_its_formula():
    generator = torch.Generator().manual_seed(3)
    logits, teacher = (torch.randn(40, 4, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(40, 4, generator=generator, dtype=torch.float64)
    weights = weights / weights.sum()

    def formula(z):
        log_t, log_d = teacher.log_softmax(-1), z.log_softmax(-1)
        overlap = torch.minimum(log_t.exp(), log_d.exp()).sum(-1)
        kl = (log_t.exp() * (log_t - log_d)).sum(-1)
        share = torch.exp(-3.0 * (overlap.detach() * weights).sum())
        return (weights * (share * kl + (1 - share) * (1 - overlap))).sum(), overlap.detach()

    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (total, overlap), (value, known) = divergence(2.0 * found, teacher, weights), formula(2.0 * expected)
    (3.0 * total).backward()
    (3.0 * value).backward()
    assert torch.allclose(total, value)
    assert torch.allclose(overlap, known)
    assert torch.allclose(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_drafts_see_nothing_of_what_comes(case):
    """A drafter asked at p drafts alike whatever the text and its taps are behind p."""
    params, text = case.params(), case.held_out[0]
    at = np.array([text.answer_start + 4])
    batch = gather([text], [at], case.files, case.shape.n_slots)
    later = gather([text], [np.array([*at, len(text.token_ids) - 2])], case.files, case.shape.n_slots)
    alone, _ = case.drafter.draft(params, case.drafter.tensors(batch))
    beside, _ = case.drafter.draft(params, case.drafter.tensors(later))
    assert torch.equal(alone[0, 0], beside[0, 0])


def test_it_learns(case):
    trainer = case.trainer(n_steps=150, n_warmup=10)
    before = measure(case.drafter, trainer.params, case.learned, case.files)["tokens_a_step"]["4"]
    run(trainer, case)
    after = measure(case.drafter, trainer.params, case.learned, case.files)
    assert after["tokens_a_step"]["4"] > before + 0.1
    assert after["survival"][0] == max(after["survival"])
    json.dumps(after)


def test_a_run_repeats_itself_and_goes_on_where_it_was(case, tmp_path):
    whole = run(case.trainer(), case)
    again = run(case.trainer(), case)
    assert all(np.array_equal(whole.params[name], again.params[name]) for name in whole.params)

    def stop_within(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return case.batch(step)

    saved = []
    with pytest.raises(KeyboardInterrupt):
        run(case.trainer(), case, saved, batch_of=stop_within)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [one.step for one in saved] == [6]
    save(tmp_path, saved[0])
    shapes = {name: one.shape for name, one in case.first.items()}
    half = run(case.trainer(load(tmp_path, shapes)), case)
    assert half.step == whole.step == 12
    assert all(np.array_equal(whole.params[name], half.params[name]) for name in whole.params)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_what_was_saved(case):
    def broken(step):
        batch = case.batch(step)
        if step == 3:
            batch.teacher[:] = np.nan
        return batch

    saved = []
    with pytest.raises(TrainingFailed, match=r"the loss of step 3 is nan; .* --learning-rate a smaller value"):
        run(case.trainer(save_every_s=-1.0), case, saved, batch_of=broken)
    assert [one.step for one in saved] == [1, 2, 3]
    assert all(np.isfinite(one).all() for one in saved[-1].params.values())


def test_convolutions_that_do_nothing_and_empty_codebooks_leave_a_parallel_head(tmp_path):
    case = Case("dflash2", tmp_path)
    for name, one in case.first.items():
        if name.endswith("base_kernel"):
            one[:, 0], one[:, 1:] = 1.0, 0.0
        elif name.endswith(("kernel_projection.weight", "codebook")):
            one[:] = 0.0
    batch = case.drafter.tensors(case.batch())
    tokens, _ = case.drafter.draft(case.params(), batch)
    plain = Drafter(replace(case.shape, kind="dspark", n_slots=5), case.drafter.vocabulary, torch.from_numpy(case.rms))
    rows = plain._block_rows(case.params(), batch)[:, :, 1:]
    best = case.drafter.vocabulary.ids[(rows @ case.drafter.vocabulary.head.T).argmax(-1)]
    assert torch.equal(tokens, best)


def test_what_is_not_among_a_slots_best_is_not_drafted(tmp_path):
    case = Case("dspark", tmp_path, topk=1)
    case.first["markov_head.markov_w2.weight"][:] *= 100.0
    batch = case.drafter.tensors(case.batch())
    rows = case.drafter._block_rows(case.params(), batch)
    best = case.drafter.vocabulary.ids[(rows @ case.drafter.vocabulary.head.T).argmax(-1)]
    assert torch.equal(case.drafter.draft(case.params(), batch)[0], best)
    assert float(case.drafter.overlaps(case.params(), batch).max()) < 1.0


def test_a_markov_head_of_zeros_is_a_parallel_head(tmp_path):
    case = Case("dspark", tmp_path)
    case.first["markov_head.markov_w2.weight"][:] = 0.0
    batch = case.drafter.tensors(case.batch())
    tokens, _ = case.drafter.draft(case.params(), batch)
    rows = case.drafter._block_rows(case.params(), batch)
    assert torch.equal(tokens, case.drafter.vocabulary.ids[(rows @ case.drafter.vocabulary.head.T).argmax(-1)])
