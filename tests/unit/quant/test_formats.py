import gguf
import pytest

from tiercel.base.errors import ShapeError
from tiercel.quant.formats import GGUF_TYPES, GGUF_TYPES_NOT_READ, Format


@pytest.mark.parametrize("type_id", GGUF_TYPES)
def test_group_sizes_and_ids_are_those_of_the_gguf_package(type_id):
    kind = gguf.GGMLQuantizationType(type_id)
    weight_format = GGUF_TYPES[type_id]
    assert kind.name.lower() == weight_format.value
    assert gguf.GGML_QUANT_SIZES[kind] == (weight_format.group, weight_format.group_bytes)


def test_every_format_but_the_one_in_three_tensors_has_one_gguf_id():
    assert sorted(GGUF_TYPES.values()) == sorted(set(Format) - {Format.NVFP4})


@pytest.mark.parametrize("type_id", GGUF_TYPES_NOT_READ)
def test_refused_types_have_the_names_of_the_gguf_package(type_id):
    assert gguf.GGMLQuantizationType(type_id).name == GGUF_TYPES_NOT_READ[type_id]


def test_nbytes_counts_whole_groups_in_unbounded_integers():
    assert Format.Q4_K.nbytes(512) == 288
    assert Format.F32.nbytes(1 << 70) == 1 << 72
    assert Format.Q6_K.bits_per_weight == 6.5625


@pytest.mark.parametrize("n_weights", [-32, 1, 31, 33])
def test_a_part_of_a_group_has_no_size(n_weights):
    with pytest.raises(ShapeError, match="multiple of 32"):
        Format.Q8_0.nbytes(n_weights)
