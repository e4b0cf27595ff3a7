"""The drafter that docs/drafters.md shows: what it says there runs as it stands."""

import re
import sys
from pathlib import Path

import pytest

from tiercel import LLM, SamplingParams
from tiercel.testing.tiny_model import write_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
SMALL = {"threads": 1, "max_num_seqs": 4, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def module(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_drafters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_drafters:Repeats"
    sys.modules.pop("my_drafters", None)


def test_the_drafter_of_the_page_drafts_and_changes_no_answer(module, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    prompts = ["abcabcabcabc", "one two one two"]
    with LLM(folder, speculative="off", **SMALL) as llm:
        plain = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
    config = {"method": "custom", "module_path": module, "options": {"period": 2}, "adaptive": False}
    with LLM(folder, speculative_config=config, **SMALL) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
        stats = llm.stats()
    assert found == plain
    assert stats["n_drafts"] > 0
    assert stats["n_failures"] == 0
