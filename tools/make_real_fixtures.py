"""Writes what transformers answers on a real GGUF model's dequantised weights, greedily, in float32.

    HF_HUB_OFFLINE=1 PYTHONPATH=src python tools/make_real_fixtures.py MODEL.gguf NAME

needs the extra `oracle`. The output, tests/model/real/NAME.json, holds for each of 20 prompts its token ids,
the 32 tokens that follow, and at each step the runner-up and how far its logit is behind: where that is below 1e-3,
either token is right.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.text.tokenizer import Tokenizer

N_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In 1969, the first humans",
    "To make a good cup of tea, you should",
    "The opposite of hot is",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is the",
    "She opened the door and",
    "Photosynthesis is the process by which",
    "Q: What is 2 + 2?\nA:",
    "The largest planet in our solar system is",
    "<html>\n<head>\n<title>",
    "Shakespeare wrote the play",
    "My favourite season is autumn because",
    "Ein kleiner Hund läuft durch",
)


def main(path: Path, name: str) -> None:
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    shift = 1.0 if checkpoint.norm_weights_include_one else 0.0
    state = {}
    for key in checkpoint.tensors:
        values = checkpoint.tensors[key].float32()
        state[key] = torch.from_numpy(values - shift if key.endswith("norm.weight") else values)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    cases = [_case(model, tokenizer, prompt) for prompt in PROMPTS]
    target = Path(__file__).parent.parent / f"tests/model/real/{name}.json"
    target.write_text(
        json.dumps({"model": path.name, "digest": checkpoint.digest(), "cases": cases}, separators=(",", ":")) + "\n"
    )


@torch.no_grad()
def _case(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str) -> dict:
    ids = tokenizer.encode(prompt)
    tokens, runners_up, margins = [], [], []
    step, past = torch.tensor([ids]), None
    for _ in range(N_TOKENS):
        out = model(step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = torch.topk(out.logits[0, -1], 2)
        tokens.append(int(best.indices[0]))
        runners_up.append(int(best.indices[1]))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
        step = torch.tensor([[tokens[-1]]])
    return {"prompt": prompt, "prompt_ids": ids, "tokens": tokens, "runners_up": runners_up, "margins": margins}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
