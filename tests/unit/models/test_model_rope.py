import json
from pathlib import Path

import numpy as np
import pytest

from tiercel.models.rope import parse_rope

TABLES = json.loads((Path(__file__).parent.parent.parent / "model" / "rope_tables.json").read_text())


def parsed(params, head_dim=32, max_position=256):
    return parse_rope(params, head_dim=head_dim, max_position=max_position, default_theta=1e4)


@pytest.mark.parametrize("row", TABLES, ids=lambda row: f"{row['name']}-{row['length']}")
def test_frequencies_equal_those_of_transformers(row):
    table = parsed(row["params"], row["head_dim"], row["max_position"]).table(row["length"])
    assert table.inv_freq.dtype == np.float32
    assert np.allclose(table.inv_freq, row["inv_freq"], rtol=2e-6, atol=0.0)
    assert table.magnitude == pytest.approx(row["magnitude"], rel=1e-6)


def test_divisors_from_a_gguf_file_divide_the_default_frequencies():
    divisors = [1.0] * 8 + [8.0] * 8
    table = parsed({"rope_type": "tiercel_freq_factors", "rope_theta": 5e5, "freq_factors": divisors}).table(256)
    default = parsed({"rope_theta": 5e5}).table(256)
    assert np.allclose(table.inv_freq * divisors, default.inv_freq, rtol=1e-6)


def test_llama3_scaling_and_its_divisors_agree():
    """What a converter writes for a llama3 model must give the table that the llama3 parameters give."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    expected = parsed(llama3).table(256).inv_freq
    default = parsed({"rope_theta": 5e5}).table(256).inv_freq
    divisors = (default / expected).tolist()
    table = parsed({"rope_type": "tiercel_freq_factors", "rope_theta": 5e5, "freq_factors": divisors}).table(256)
    assert np.allclose(table.inv_freq, expected, rtol=1e-6)


def test_the_older_name_of_longrope_is_known():
    params = {"type": "su", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 4.0}
    rope = parsed(params | {"original_max_position_embeddings": 64})
    assert rope.kind == "longrope"
    assert np.allclose(rope.table(64).inv_freq, 4.0 * rope.table(65).inv_freq)
