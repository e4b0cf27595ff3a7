"""A run from end to end, on a tiny target: what it leaves is read by the loaders. Needs torch."""

import json

import pytest

from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError
from tiercel.boot.plan import make_plan
from tiercel.models.drafters.checkpoint import open_drafter
from tiercel.testing.tiny_model import write_tiny_model
from tiercel.train import texts
from tiercel.train.options import TrainOptions
from tiercel.train.run import train_drafter

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, questions, and a folder of data that all runs share."""
    folder = tmp_path_factory.mktemp("training")
    write_tiny_model(folder / "tiny", config={"num_hidden_layers": 5})
    (folder / "questions.txt").write_text("\n".join(f"question {i}?" for i in range(40)))
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(texts, "SHARD", 32)


def options(place, **changes):
    usual = {
        **{"data": str(place / "data"), "prompts": str(place / "questions.txt"), "tokens": 600, "held_out": 3},
        **{"max_len": 96, "draft_vocab": 64, "draft_tokens": 3, "rank": 8, "steps": 3, "threads": 1, "anchors": 6},
    }
    return TrainOptions(**{**usual, **changes})


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "eagle3"])
def test_what_a_run_leaves_is_a_drafter_of_its_target(place, tmp_path, kind):
    out = tmp_path / "out"
    own = {"rank": None} if kind == "eagle3" else {}
    found = train_drafter(str(place / "tiny"), kind, out, options(place, **own), "tiercel train-drafter ..")
    assert 1.0 <= found["tokens_a_step"]["3"] <= 4.0
    told = json.loads((out / "results.json").read_text())["training"]
    assert told["precision"] in ("float32", "bfloat16")
    plan = make_plan(EngineOptions(model=str(place / "tiny")))
    with plan.checkpoint:
        drafter = open_drafter(out, plan.model, plan.checkpoint.tensors)
        assert drafter.model.name == kind
        assert drafter.model.taps == ((2,) if kind == "eagle3" else (1, 2))
        assert drafter.trained_on == plan.checkpoint.digest()
        assert drafter.d2t.shape == (64,)
        drafter.model.record_draft({**plan.checkpoint.tensors, **drafter.tensors}, first=plan.info.next_layer)
        drafter.close()
    card, report = (out / "README.md").read_text(), (out / "report" / "report.md").read_text()
    assert f"{kind} drafter for tiny" in card
    assert "tiercel train-drafter .." in card
    assert all((out / "report" / f"{name}.svg").exists() and name in report for name in ("learning", "survival"))
    assert json.loads((out / "results.json").read_text())["found"] == found

    # All is done: the same command leaves the same, and one of other options nothing.
    weights = (out / "model.safetensors").read_bytes()
    train_drafter(str(place / "tiny"), kind, out, options(place, **own), "tiercel train-drafter ..")
    assert (out / "model.safetensors").read_bytes() == weights
    with pytest.raises(ConfigError, match="anchors was 6 and is 4"):
        train_drafter(str(place / "tiny"), kind, out, options(place, anchors=4, **own), "")
    with pytest.raises(ConfigError, match="max_len_tokens was 96 and is 80"):
        train_drafter(str(place / "tiny"), kind, tmp_path / "other", options(place, max_len=80, **own), "")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("eagle3", {"layers": 2, "rank": None}, "an eagle3 drafter has one layer"),
        ("eagle3", {"topk": 4, "rank": None}, "eagle3 drafts its likeliest token"),
        ("eagle3", {}, "rank: got 8; eagle3 has no table"),
        ("dspark", {"topk": 65}, "topk: got 65; 64 tokens can be drafted"),
        ("dflash2", {"topk": 1}, "dflash2 chooses among 2 candidates or more"),
        ("dspark", {"draft_vocab": 1000}, "the target has 264 tokens"),
        ("dspark", {"device": "cuda"}, "torch finds no GPU here"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_begun(place, tmp_path, monkeypatch, kind, changes, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=said):
        train_drafter(str(place / "tiny"), kind, tmp_path / "out", options(place, **changes), "")
    assert not (tmp_path / "out").exists()
