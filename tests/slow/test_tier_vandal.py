"""Two engines on one folder, whose files somebody changes, swaps, cuts and deletes all the while: no token differs."""

import random
import subprocess
import sys

import pytest

from tiercel.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

_CHILD = """
import random, sys
from tiercel import LLM, SamplingParams
model, folder, seed, n = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
prompts = [[(s * 31 + t * 3) % 250 for t in range(48 + 7 * s)] for s in range(8)]
tier = {"type": "disk", "path": folder, "capacity": "300KiB", "store_sights": 1, "rest_s": 0.2}
options = {"threads": 1, "max_num_seqs": 1, "max_model_len": 192}  # too small a pool for what is asked again
params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)


def answer(llm, prompt):
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output, (output.outputs[0].token_ids, output.outputs[0].logprobs)


n_loaded = 0
with LLM(model, **options) as plain, LLM(model, kv_tiers=[tier], **options) as llm:
    want = [answer(plain, prompt)[1] for prompt in prompts]
    print("ready", flush=True)
    for i in range(n):
        at = rng.randrange(len(prompts))
        output, got = answer(llm, prompts[at])
        assert got == want[at], (seed, i)
        n_loaded += sum((output.cached_by_tier or {}).values())
    told = llm.stats()["tier 1:disk"]
print("done", n_loaded, told["n_invalid"], flush=True)
"""


def spoil(path, rng):
    """Do something to a file, which may be gone by now."""
    files = [file for file in path.rglob("*.kv") if file.is_file()]
    if not files:
        return
    file = rng.choice(files)
    what = rng.randrange(4)
    data = bytearray(file.read_bytes())
    if what == 0 and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == 1:
        del data[rng.randrange(len(data) + 1) :]
    elif what == 2:
        data = bytearray(rng.choice(files).read_bytes())
    else:
        return file.unlink()
    file.write_bytes(data)


def test_engines_on_a_folder_that_is_vandalised_answer_as_without_it(tmp_path):
    rng = random.Random(5)
    model, path = str(write_tiny_model(tmp_path / "tiny")), tmp_path / "kv"
    words = [sys.executable, "-c", _CHILD, model, str(path)]
    children = [subprocess.Popen([*words, str(seed), "400"], stdout=subprocess.PIPE, text=True) for seed in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    while any(child.poll() is None for child in children):
        try:
            spoil(path, rng)
        except OSError:
            continue
    said = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum(int(words[1]) for words in said) > 0, "pages were loaded"
    assert sum(int(words[2]) for words in said) > 0, "and some of them were damaged"
