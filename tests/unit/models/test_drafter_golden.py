"""Programs of tiny drafters, recorded and lowered, as text, with their target's, which keeps their context.

To write the files again, from the repository's root:  PYTHONPATH=src python tests/unit/models/test_drafter_golden.py
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.models.drafters.config import in_one_form
from tiercel.models.drafters.dflash2 import DFlash2
from tiercel.models.drafters.dspark import DSpark
from tiercel.models.drafters.eagle3 import Eagle3
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format

GOLDEN = Path(__file__).parent / "golden_drafters"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
}
BLOCK = {"target_layer_ids": [-1, 1], "block_size": 4}
CASES = {
    "dspark_own_vocabulary_mask_vector": (
        DSpark,
        {"architectures": ["DSparkDraftModel"], "draft_vocab_size": 96, "markov_rank": 8, **BLOCK},
        {"mask_embedding"},
    ),
    "dflash2": (
        DFlash2,
        {
            "architectures": ["DFlash2DraftModel"],
            **{"conv_group_size": 32, "selector_rank": 8, "selector_top_k": 4, "mask_token_id": 1},
            **{"layer_types": ["sliding_attention"], "sliding_window": 32},
            **BLOCK,
        },
        {"layers.0.self_attn.q_norm.weight"},
    ),
    "eagle3": (
        Eagle3,
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96, "target_layer_ids": [0, 1, 2]},
        {"lm_head.weight"},
    ),
}


def texts(case):
    kind, fields, names = CASES[case]
    target = build_model({"architectures": ["LlamaForCausalLM"], **SIZES, "num_hidden_layers": 4})
    drafter = kind.from_config(in_one_form(SIZES | fields)[1], target, frozenset(names))
    shapes = target.expected_weights() | drafter.draft_weights()

    def planned(shape):
        return SimpleNamespace(shape=shape, format=Format.Q8_0 if len(shape) == 2 else Format.F32)

    tensors = {name: planned(shape) for name, shape in shapes.items()}
    programs = {
        "target": target.record(tensors, drafter=drafter),
        "draft": drafter.record_draft(tensors, first=target.info.next_layer),
    }
    found = {f"{case}.{name}.recorded.txt": program.text() for name, program in programs.items()}
    return found | {f"{case}.{name}.lowered.txt": lower_and_fuse(p).text() for name, p in programs.items()}


@pytest.mark.parametrize("case", CASES)
def test_drafters_programs_equal_their_golden_texts(case):
    for name, text in texts(case).items():
        assert text == (GOLDEN / name).read_text(), name


def test_every_golden_file_of_a_drafter_has_a_case():
    assert sorted(p.name for p in GOLDEN.glob("*.txt")) == sorted(name for case in CASES for name in texts(case))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        for name, text in texts(case).items():
            (GOLDEN / name).write_text(text)
