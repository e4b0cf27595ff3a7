"""`tiercel train-drafter`: what it refuses before anything is begun."""

import importlib.util

import pytest

from tiercel.cli.main import main
from tiercel.train import run


def test_without_torch_the_extra_is_named(home, monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    out = tmp_path / "out"
    assert main(["train-drafter", "tiny", "--kind", "dspark", "--out", str(out)]) == 2
    assert "torch is not installed; it is in an extra: pip install 'tiercel[train]'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "medusa"], "invalid choice: 'medusa'"),
        (["--kind", "dspark", "--taps", "3,1"], "need layers in ascending order"),
        (["--kind", "dspark", "--draft-tokens", "0"], "needs a whole number of 1 or more"),
        (["--kind", "dspark", "--greedy-frac", "2"], "at most 1 is taken"),
        (["--kind", "dspark", "--minutes", "0"], "needs a number of 0.01 or more"),
        (["--kind", "dspark", "--layer", "2"], "did you mean --layers?"),
        ([], "required: --kind"),
    ],
)
def test_a_wrong_flag_is_usage(home, capsys, words, said):
    assert main(["train-drafter", "tiny", "--out", "here", *words]) == 2
    assert said in capsys.readouterr().err


def test_its_help_names_every_option(home, capsys):
    assert main(["train-drafter", "--help=all"]) == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--kind", "--out", "--data", "--minutes", "--draft-vocab", "--learning-rate"))
