"""An engine that is killed at random moments while it stores: what it left is read as good only if it is."""

import random
import subprocess
import sys

import pytest

from tiercel import LLM, SamplingParams
from tiercel.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

_CHILD = """
import sys
from tiercel import LLM, SamplingParams
model, folder, seed = sys.argv[1:]
tier = {"type": "disk", "path": folder, "capacity": "1MiB", "store_sights": 1}
with LLM(model, kv_tiers=[tier], threads=1, max_num_seqs=4) as llm:
    print("ready", flush=True)
    for i in range(10_000):
        ids = [(int(seed) * 31 + i * 7 + t * 3) % 250 for t in range(64 + i % 40)]
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
"""


def prompt_of(seed, i):
    return [(seed * 31 + i * 7 + t * 3) % 250 for t in range(64 + i % 40)]


def test_an_engine_killed_at_any_moment_leaves_no_page_that_is_wrong(tmp_path):
    rng = random.Random(3)
    model = str(write_tiny_model(tmp_path / "tiny"))
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    n_cached = 0
    with LLM(model, threads=1, max_num_seqs=4) as plain:
        for seed in range(8):
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, model, str(tmp_path / "kv"), str(seed)], stdout=subprocess.PIPE
            )
            assert child.stdout.readline() == b"ready\n"
            try:
                child.wait(rng.random())
            except subprocess.TimeoutExpired:
                child.kill()
            child.wait()
            child.stdout.close()
            tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB", "store_sights": 1}
            with LLM(model, kv_tiers=[tier], threads=1, max_num_seqs=4) as llm:
                for i in range(6):
                    prompt = [{"prompt_token_ids": prompt_of(seed, i)}]
                    (want,) = plain.generate(prompt, params, use_tqdm=False)
                    (got,) = llm.generate(prompt, params, use_tqdm=False)
                    assert got.outputs[0].token_ids == want.outputs[0].token_ids
                    assert got.outputs[0].logprobs == want.outputs[0].logprobs
                    n_cached += sum((got.cached_by_tier or {}).values())
            assert not [file for file in (tmp_path / "kv").rglob("*.tmp")]
    assert n_cached > 0
