"""Writes what transformers embeds texts to with a real sentence-transformers folder: mean of the tokens, length one.

    HF_HUB_OFFLINE=1 python tools/make_embedding_fixture.py FOLDER NAME

needs the extra `oracle`. The output, tests/model/real/NAME.json, holds for each text its token ids and the first 16
numbers of its vector, and the cosine of each two texts.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

TEXTS = (
    # The two of the model's own card.
    "This is an example sentence",
    "Each sentence is converted",
    "A man is eating a piece of bread.",
    "Someone eats bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "How do I reset my password?",
    "I forgot my login details.",
    "Die Katze schläft auf dem Sofa.",
    "naïve café — 42 €!",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 20,
)
N_COLUMNS = 16


def main(folder: str, name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, vectors = [], []
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            mean = model(**encoded).last_hidden_state[0].mean(dim=0)
        ids.append(encoded["input_ids"][0].tolist())
        vectors.append(mean / mean.norm())
    all_vectors = torch.stack(vectors)
    found = {
        "texts": list(TEXTS),
        "token_ids": ids,
        "columns": [[round(v, 7) for v in row[:N_COLUMNS].tolist()] for row in all_vectors],
        "cosines": [[round(v, 6) for v in row] for row in (all_vectors @ all_vectors.T).tolist()],
    }
    out = Path(__file__).parent.parent / "tests" / "model" / "real" / f"{name}.json"
    out.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
