"""Makes tests/model/pooling_fixtures: tiny pooling models' rows, as transformers computes them.

Needs the extra `oracle`; the tests do not. From the repository's root:

    HF_HUB_OFFLINE=1 PYTHONPATH=src python tools/make_pooling_fixtures.py

A fixture holds the config, the ids of a text (24 tokens; with `n_first`, of a pair), and the first 12 columns of the
rows: of every token, or of a sequence classifier its one row. Weights are `tiercel.testing.fill` by tensor name.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tiercel.testing.fill import fill_by_name

OUT = Path(__file__).parent.parent / "tests" / "model" / "pooling_fixtures"
# Without 1, RoBERTa's padding: transformers gives a padding token no position of its own.
IDS = [(7 * t + 3) % 126 + 2 for t in range(24)]
N_COLUMNS = 12
BERT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
QWEN: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def models() -> dict[str, tuple[Any, type, int | None]]:
    roberta = BERT | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
    odd = BERT | {"hidden_size": 72, "num_attention_heads": 3, "hidden_act": "gelu_new"}
    return {
        "bert": (hf.BertConfig(**BERT), hf.BertModel, 9),
        "bert_odd_heads_gelu_new": (hf.BertConfig(**odd), hf.BertModel, None),
        "bert_classify_pair": (hf.BertConfig(**BERT, num_labels=3), hf.BertForSequenceClassification, 9),
        "bert_tokens": (hf.BertConfig(**BERT, num_labels=3), hf.BertForTokenClassification, None),
        "roberta": (hf.RobertaConfig(**roberta), hf.RobertaModel, None),
        "roberta_classify": (
            hf.RobertaConfig(**roberta, num_labels=2),
            hf.RobertaForSequenceClassification,
            None,
        ),
        "qwen3_classify": (
            hf.Qwen3Config(**QWEN, head_dim=16, pad_token_id=0, num_labels=3),
            hf.Qwen3ForSequenceClassification,
            None,
        ),
        "llama_classify": (
            hf.LlamaConfig(**QWEN, pad_token_id=0, num_labels=1),
            hf.LlamaForSequenceClassification,
            None,
        ),
        "qwen3_embed": (hf.Qwen3Config(**QWEN, head_dim=16), hf.Qwen3Model, None),
    }


def rows_of(config: Any, kind: type, n_first: int | None) -> torch.Tensor:
    config._attn_implementation = "eager"
    model = kind(config).eval()  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What a backbone lacks when it is alone; here it has it.
            whole = f"model.{name}" if kind is hf.Qwen3Model else name
            parameter.copy_(torch.from_numpy(fill_by_name(whole, tuple(parameter.shape))))
        segments = {}
        if n_first is not None:
            segments["token_type_ids"] = torch.tensor([[int(t >= n_first) for t in range(len(IDS))]])
        out = model(input_ids=torch.tensor([IDS]), **segments)
    rows = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return rows.reshape(-1, rows.shape[-1])


def write() -> None:
    OUT.mkdir(exist_ok=True)
    for name, (config, kind, n_first) in models().items():
        rows = rows_of(config, kind, n_first)
        d = json.loads(config.to_json_string(use_diff=False))
        d["architectures"] = [kind.__name__]
        d.pop("transformers_version", None)
        found = {
            "config": d,
            "token_ids": IDS,
            "n_first": n_first,
            "rows": [[float(f"{v:.7g}") for v in row[:N_COLUMNS].tolist()] for row in rows],
        }
        (OUT / f"{name}.json").write_text(json.dumps(found, indent=None) + "\n")


if __name__ == "__main__":
    write()
