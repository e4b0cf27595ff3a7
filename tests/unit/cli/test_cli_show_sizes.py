"""The arithmetic of `tiercel show`, from configs alone: golden text, and numbers that are known from elsewhere.

To write the golden files again, from the repository's root: PYTHONPATH=src python tests/unit/cli/test_cli_show_sizes.py
"""

import json
from pathlib import Path

import pytest
from released_configs import DEEPSEEK_V3, KIMI_K3, RELEASED, SMOLLM2

from tiercel.base.errors import ConfigError
from tiercel.cli import show, show_sizes
from tiercel.cli.main import main
from tiercel.hub.resolve import ResolvedModel
from tiercel.runner.sizes import what_fits
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, LATENT_CONFIG, MIXTURE_CONFIG, write_tiny_model

GOLDEN = Path(__file__).parent / "golden"
MEMORY = {"kimi_k3": 2 << 40, "deepseek_v3": 1 << 40, "mamba_codestral": 24 << 30, "smollm2": 1 << 30}


def told_of(name, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(RELEASED[name]), encoding="utf-8")
    return show_sizes.describe_config(path)


def text_of(told, name):
    rows = [*told["summary"], *show_sizes.rows_of(told["sizes"], MEMORY[name])]
    return "".join(f"{key:<31}{value}\n" for key, value in rows)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return {name: told_of(name, tmp_path_factory.mktemp(name)) for name in RELEASED}


@pytest.mark.parametrize("name", RELEASED)
def test_the_arithmetic_of_a_released_config_equals_its_golden_text(released, name):
    assert text_of(released[name], name) == (GOLDEN / f"show_{name}.txt").read_text()


def test_kimi_k3_is_as_large_as_it_is_said_to_be(released):
    """2.78 T parameters of which a token meets 104 B; 27,648 B a token; 449 MB a sequence; 1,453.7 GiB of files."""
    sizes = released["kimi_k3"]["sizes"]
    assert round(sizes.n_weights / 1e12, 2) == 2.78
    assert round(sizes.n_active / 1e9) == 104
    assert sizes.kv_bytes["float16"] == 27_648
    assert round(sizes.state_stored_bytes / 1e6) == 449
    assert sizes.state_bytes == 69 * 4 * (96 * 128 * 128 + 3 * 36_864)
    # The files hold a vision tower of some 0.4 B parameters beside it.
    assert 0.7 < 1453.7 - sizes.n_bytes / 2**30 < 1.6
    assert [round(sizes.saved_by_sharding(n) / 2**30, 2) for n in (4, 8)] == [16.98, 19.81]


def test_deepseek_v3_is_as_large_as_it_is_said_to_be(released):
    """671 B parameters of which a token meets 37 B; 61 rows of 576 numbers a token."""
    sizes = released["deepseek_v3"]["sizes"]
    assert round(sizes.n_weights / 1e9) == 671
    assert round(sizes.n_active / 1e9) == 37
    assert sizes.kv_bytes["float16"] == 61 * 576 * 2


def test_a_tied_embedding_is_counted_once_and_met_whole(released):
    sizes = released["smollm2"]["sizes"]
    assert sizes.n_weights == sizes.n_active == 134_515_008
    assert sizes.n_bytes == 2 * sizes.n_weights
    assert {part.name for part in sizes.parts} == {"attention", "feed-forward", "embedding and head", "norms"}


def test_what_fits_is_what_the_bytes_come_to(released):
    sizes = released["smollm2"]["sizes"]
    room = sizes.n_bytes + 100 * sizes.kv_bytes["float16"]
    assert what_fits(sizes, room).n_tokens == 100
    assert what_fits(sizes, room - 1).n_tokens == 99
    assert what_fits(sizes, sizes.n_bytes).n_tokens == 0
    assert what_fits(sizes, sizes.n_bytes - 1).left_bytes == -1
    fit = what_fits(sizes, sizes.n_bytes + 3 * 4096 * sizes.kv_bytes["float16"])
    assert fit.n_sequences == {4096: 3, 8192: 1}
    state_only = released["mamba_codestral"]["sizes"]
    fit = what_fits(state_only, state_only.n_bytes + 5 * state_only.state_bytes)
    assert (fit.n_tokens, list(fit.n_sequences.values())) == (None, [5])


def test_a_path_to_a_config_and_a_folder_with_nothing_else_say_the_same(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMOLLM2), encoding="utf-8")
    said = []
    for name in (path, tmp_path):
        assert main(["show", str(name), "--memory", "1GiB"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "parameters            135 M (134,515,008)\n" in said[0]
    assert "in 1.0 GiB            767.4 MiB are left beside the weights\n" in said[0]


def test_of_a_repository_the_config_is_asked_for_and_its_name_shown(tmp_path, capsys, monkeypatch):
    """Unless the program is wanted, which the weights decide."""
    asked = []

    def find(request, *, offline, config_only, **source):
        asked.append((request.model, config_only))
        return ResolvedModel(tmp_path, "org/large", "hub")

    monkeypatch.setattr(show, "find_model", find)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    assert main(["show", "org/large"]) == 0
    assert capsys.readouterr().out.startswith("model                 org/large\n")
    assert main(["show", "org/large", "--program"]) == 2
    assert asked == [("org/large", True), ("org/large", False)]


def test_json_has_the_numbers(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3 | {"num_hidden_layers": 4}), encoding="utf-8")
    assert main(["show", str(path), "--memory", "64GiB", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["n_weights"] == sum(part["n_weights"] for part in sizes["parts"])
    assert sizes["kv_bytes"] == {"float16": 4608, "float32": 9216}
    assert set(sizes["shared_experts_saved_bytes"]) == {"4", "8"}
    assert sizes["fits"]["memory_bytes"] == 64 << 30


@pytest.mark.parametrize("config", [{}, MIXTURE_CONFIG, LATENT_CONFIG, ATTENTION_FREE_CONFIG])
def test_a_checkpoint_and_its_config_alone_say_the_same(tmp_path, capsys, config):
    write_tiny_model(tmp_path / "whole", config={**config, "dtype": "float32"})
    alone = tmp_path / "config.json"
    alone.write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    found = []
    for name in (tmp_path / "whole", alone):
        assert main(["show", str(name), "--memory", "1GiB", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["sizes"])
    assert found[0] == found[1]
    n_file_bytes = sum(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))
    assert found[0]["n_bytes"] < n_file_bytes < found[0]["n_bytes"] + 16_384, "the file has a header besides"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "not valid UTF-8 JSON"),
        ("[]", "an object is needed"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        ("{}", "architecture None is not implemented"),
        (
            json.dumps(SMOLLM2 | {"num_attention_heads": 8}),
            "num_key_value_heads is 3; a divisor of num_attention_heads 8",
        ),
        (json.dumps(SMOLLM2 | {"hidden_size": None}), "hidden_size is missing"),
        (json.dumps(SMOLLM2 | {"num_hidden_layers": 10**6}), "at most 1024 layers"),
        (json.dumps(SMOLLM2 | {"torch_dtype": "int7"}), "dtype is 'int7'"),
        (json.dumps(SMOLLM2 | {"quantization_config": {"quant_method": "magic"}}), "quant_method: got 'magic'"),
        (json.dumps(SMOLLM2 | {"novel_field": 3}), "novel_field is 3"),
        (json.dumps(DEEPSEEK_V3 | {"n_routed_experts": 10**6}), "at most 4096 experts"),
        (json.dumps(KIMI_K3 | {"text_config": 7}), "text_config is 7; an object is needed"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_what_is_wrong(tmp_path, capsys, text, says):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert main(["show", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1, "one line, and no traceback"


@pytest.mark.parametrize("flag", ["--program", "--explain"])
def test_what_needs_weights_is_refused_without_them(tmp_path, capsys, flag):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    assert main(["show", str(tmp_path), flag]) == 2
    assert "has no weights beside it" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["lots", "-1GiB", "0", "1.5B"])
def test_memory_that_is_no_size_is_refused_by_its_flag(text):
    with pytest.raises(ConfigError, match=r"--memory"):
        show_sizes.read_memory(text)


if __name__ == "__main__":
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    for one in RELEASED:
        with tempfile.TemporaryDirectory() as place:
            (GOLDEN / f"show_{one}.txt").write_text(text_of(told_of(one, Path(place)), one))
