"""From a config's architecture name to the model that implements it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tiercel.base.errors import UnsupportedModel
from tiercel.models.bert import (
    Bert,
    BertForSequenceClassification,
    BertForTokenClassification,
    Roberta,
    RobertaForSequenceClassification,
)
from tiercel.models.deepseek import DeepseekV2, DeepseekV3
from tiercel.models.gemma3 import Gemma3
from tiercel.models.gpt_oss import GptOss
from tiercel.models.kimi_k3 import KimiK3, KimiK3Multimodal
from tiercel.models.lfm2 import Lfm2
from tiercel.models.ling import Ling
from tiercel.models.llama import Llama, Mistral, SmolLM3
from tiercel.models.mamba2 import Mamba2
from tiercel.models.model import Model
from tiercel.models.pooled_decoder import POOLED_DECODERS
from tiercel.models.qwen import Qwen2, Qwen3
from tiercel.models.qwen3_5 import Qwen3_5, Qwen3_5Multimodal
from tiercel.models.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeMultimodal
from tiercel.models.qwen3_next import Qwen3Next
from tiercel.models.qwen_moe import Qwen3Moe

ARCHITECTURES: Mapping[str, type[Model]] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Mistral,
        "SmolLM3ForCausalLM": SmolLM3,
        "Qwen2ForCausalLM": Qwen2,
        "Qwen3ForCausalLM": Qwen3,
        "Gemma3ForCausalLM": Gemma3,
        "Qwen3MoeForCausalLM": Qwen3Moe,
        "DeepseekV2ForCausalLM": DeepseekV2,
        "DeepseekV3ForCausalLM": DeepseekV3,
        "Qwen3_5ForCausalLM": Qwen3_5,
        "Qwen3_5ForConditionalGeneration": Qwen3_5Multimodal,
        "BertModel": Bert,
        "BertForSequenceClassification": BertForSequenceClassification,
        "BertForTokenClassification": BertForTokenClassification,
        "RobertaModel": Roberta,
        "RobertaForSequenceClassification": RobertaForSequenceClassification,
        "XLMRobertaModel": Roberta,
        "XLMRobertaForSequenceClassification": RobertaForSequenceClassification,
        **POOLED_DECODERS,
        "Qwen3_5MoeForCausalLM": Qwen3_5Moe,
        "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeMultimodal,
        "Qwen3NextForCausalLM": Qwen3Next,
        "GptOssForCausalLM": GptOss,
        "KimiLinearForCausalLM": KimiK3,  # K3's text is one by name, and all of Kimi Linear by its config
        "KimiK3ForConditionalGeneration": KimiK3Multimodal,
        "BailingMoeV3ForCausalLM": Ling,
        "BailingHybridForCausalLM": Ling,
        "Mamba2ForCausalLM": Mamba2,
        "Lfm2ForCausalLM": Lfm2,
    }
)
"""Architecture name, as configs have it, to the class that reads and records it."""

_MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "qwen3_next": "Qwen3NextForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "bailing_hybrid": "BailingMoeV3ForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
        "kimi_k3": "KimiK3ForConditionalGeneration",
        "mamba2": "Mamba2ForCausalLM",
    }
)


def build_model(config: Mapping[str, Any], *, is_embedder: bool = False) -> Model:
    """Return the model that a config describes, its config read and checked.

    `is_embedder`: the files say that its rows are pooled, though the config names a model that generates.

    Raises:
        UnsupportedModel: the architecture, or a field that changes its arithmetic, is not implemented.
        ModelFileError: a field is missing or makes no sense.
    """
    names = config.get("architectures")
    if names is None or names == []:
        kind = config.get("model_type")
        names = [_MODEL_TYPES.get(kind, kind) if isinstance(kind, str) else kind]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        shown = ", ".join(map(str, names)) if isinstance(names, list) else repr(names)
        raise UnsupportedModel(
            f"config: architecture {shown[:80]} is not implemented; the known ones are {', '.join(ARCHITECTURES)}"
        )
    name = names[0]
    if is_embedder and name.endswith("ForCausalLM"):
        name = f"{name.removesuffix('ForCausalLM')}Model"
        if name not in ARCHITECTURES:
            raise UnsupportedModel(f"config: {names[0]} as an embedder is not implemented; {name} is none of the known")
    return ARCHITECTURES[name].from_config(config)
