"""A draft model through `LLM`, on native runners: every output is the one without, and a model drafts for itself
rightly."""

import pytest
from test_model_drafters_llm import told, turns
from test_recurrent_llm import TEXT as RECURRENT
from test_speculation_llm import CASES, SMALL, all_of

from tiercel import LLM
from tiercel.base import machine
from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, write_tiny_model

# Two layers less alike than two models of a family, and yet they agree now and then.
OTHER = {"num_hidden_layers": 1, "vocab_size": 272}


def config_of(model, **more):
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 4, "adaptive": False, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "draft", config=OTHER))


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(folder, speculative="off", **SMALL) as llm:
        return {name: all_of(llm, case) for name, case in CASES.items()}


@pytest.mark.parametrize("which", ["itself", "other"])
def test_every_output_is_the_one_without_a_draft_model(folder, other, plain, which):
    """Mixed batches, prompts in chunks, and prefixes that were cached by the cases before."""
    model = folder if which == "itself" else other
    with LLM(folder, speculative_config=config_of(model), **SMALL) as llm:
        for name, case in CASES.items():
            assert all_of(llm, case) == plain[name], name
        stats = llm.stats()
        assert stats["n_failures"] == 0
        assert stats["n_draft_tokens"] > 1000
        if which == "itself":
            assert stats["n_accepted_tokens"] > 0.7 * stats["n_draft_tokens"]  # it knows of no form


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("bounded", "formed", "stopped")])
def test_a_model_that_drafts_for_itself_is_always_right(folder, case):
    with LLM(folder, speculative_config=config_of(folder), **SMALL) as llm:
        all_of(llm, CASES[case])
        stats = llm.stats()
    assert stats["n_accepted_tokens"] == stats["n_draft_tokens"] > 50
    assert stats["n_accepted_by_position"][3] > 10


@pytest.mark.parametrize("case", ["greedy", "told sampled"])
def test_pools_that_preempt_and_evict_change_nothing(folder, case):
    """Little more than one sequence of the longest fits either pool, and four run."""
    with LLM(folder, speculative="off", max_model_len=192, **SMALL) as roomy:
        want = all_of(roomy, CASES[case], max_tokens=80)
        page_bytes = roomy.engine.plan.capacity.page_bytes
    n_bytes = 14 * page_bytes
    config = config_of(folder, kv_cache_memory_bytes=n_bytes)
    with LLM(folder, speculative_config=config, kv_cache_memory_bytes=n_bytes, max_model_len=192, **SMALL) as llm:
        assert all_of(llm, CASES[case], max_tokens=80) == want
        assert llm.stats()["n_total_preemptions"] > 0
        assert llm.stats()["n_accepted_tokens"] > 0


def test_a_chat_goes_on_from_kept_pages_and_after_a_restart_from_a_tier(folder, tmp_path):
    """The draft model has pages of its own, in no tier: it reads again what its target loads."""
    patience = {"load_deadline_s": 600.0, "lookup_deadline_s": 600.0}
    tiers = [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "store_sights": 1} | patience]
    with LLM(folder, speculative="off", **SMALL) as llm:
        wanted = told(turns(llm))
    for _ in range(2):
        with LLM(folder, speculative_config=config_of(folder), kv_tiers=tiers, **SMALL) as llm:
            found = turns(llm)
            stats = llm.stats()
        assert told(found) == wanted
        assert stats["n_accepted_tokens"] == stats["n_draft_tokens"] > 100
    assert found[0].cached_by_tier["1:disk"] > 0
    assert found[-1].num_cached_tokens > 150


def test_what_does_not_pay_is_left_alone_and_changes_nothing(folder, plain):
    """A draft model as large as the target costs more than it brings."""
    with LLM(folder, speculative_config=config_of(folder, adaptive=True), **SMALL) as llm:
        for name in ("greedy", "sampled", "formed"):
            assert all_of(llm, CASES[name]) == plain[name], name


def test_a_draft_model_in_another_format_drafts(folder, plain):
    with LLM(folder, speculative_config=config_of(folder, quantization="q8_0"), **SMALL) as llm:
        assert all_of(llm, CASES["greedy"]) == plain["greedy"]
        assert llm.stats()["n_accepted_tokens"] > 100


def test_a_draft_model_of_another_vocabulary_drafts(folder, plain, tmp_path):
    """The same bytes under other ids: the tokenizer of the draft model counts them from the end."""
    import json

    from tokenizers import Tokenizer

    made = write_tiny_model(tmp_path / "draft")
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {letter: 255 - i for letter, i in vocab.items()}
    (made / "tokenizer.json").write_text(Tokenizer.from_str(json.dumps(tokenizer)).to_str())
    with LLM(folder, speculative_config=config_of(str(made)), **SMALL) as llm:
        drafter = llm.engine.speculation._drafter
        assert drafter.vocabulary.n_shared == 259
        assert all_of(llm, CASES["greedy"]) == plain["greedy"]
        assert all_of(llm, CASES["sampled"]) == plain["sampled"]
        assert llm.stats()["n_draft_tokens"] > 100
        assert llm.stats()["n_failures"] == 0


@pytest.mark.parametrize(
    ("config", "more", "match"),
    [
        ({"model": ""}, {}, "speculative_config.model: left out"),
        ({"model": "no-such-model"}, {}, "speculative_config.model: no-such-model"),
        ({"num_speculative_tokens": 0}, {}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 513}, {}, "num_speculative_tokens"),
        ({"quantization": "q9"}, {}, "quantization"),
        ({"prompt_lookup_max": 3}, {}, "prompt_lookup_max"),
        (
            {"kv_cache_memory_bytes": 1},
            {},
            r"speculative_config\.model: .*: kv pool: 0 pages .* fit in speculative_config\.kv_cache_memory_bytes",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(folder, config, more, match):
    with pytest.raises((ConfigError, MemoryError), match=match):
        LLM(folder, speculative_config=config_of(folder) | config, **SMALL, **more)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_position_embeddings": 128}, "context is 128 tokens; the target's is 256"),
        (RECURRENT, "recurrent state"),
        (ATTENTION_FREE_CONFIG, "recurrent state"),
        ({"architectures": ["NoSuchModel"], "model_type": "no_such"}, "NoSuchModel"),
    ],
)
def test_a_draft_model_that_cannot_draft_for_the_target_is_refused_by_name(folder, tmp_path, changes, match):
    made = tmp_path / "draft"
    write_tiny_model(made, config=changes) if "NoSuchModel" not in str(changes) else write_unknown(made, changes)
    with pytest.raises(ConfigError, match=match) as caught:
        LLM(folder, speculative_config=config_of(str(made)), **SMALL)
    assert "speculative_config.model" in str(caught.value)


def test_both_pools_must_fit_the_memory_together(folder, monkeypatch):
    """Each fits alone."""
    with LLM(folder, speculative="off", **SMALL) as llm:
        n_bytes = llm.engine.plan.capacity.nbytes
    monkeypatch.setattr(machine, "available_bytes", lambda: n_bytes * 3 // 2)
    pool = {"kv_cache_memory_bytes": n_bytes}
    with LLM(folder, speculative="off", **SMALL, **pool) as llm:
        assert llm.engine.plan.capacity.nbytes == n_bytes
    with pytest.raises(
        OutOfPages, match=r"speculative_config\.model: .*speculative_config\.kv_cache_memory_bytes="
    ) as found:
        LLM(folder, speculative_config=config_of(folder, **pool), **SMALL, **pool)
    assert "beside the target's" in str(found.value)


def test_a_draft_model_whose_arrays_do_not_fit_is_named(folder, monkeypatch):
    from tiercel.boot import draft_model

    def no_memory(plan):
        raise OutOfPages("memory: all is taken; lower kv_cache_memory_bytes")

    monkeypatch.setattr(draft_model, "build_runner", no_memory)
    with pytest.raises(
        OutOfPages, match=r"speculative_config\.model: .*lower speculative_config\.kv_cache_memory_bytes"
    ):
        LLM(folder, speculative_config=config_of(folder), **SMALL)


def write_unknown(folder, changes):
    import json

    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_vocabularies_with_nothing_in_common_are_refused(folder, tmp_path):
    import json

    made = write_tiny_model(tmp_path / "draft")
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    kept = dict(list(tokenizer["model"]["vocab"].items())[:50])
    tokenizer["model"]["vocab"] = kept
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokens in common"):
        LLM(folder, speculative_config=config_of(str(made)), **SMALL)


def test_without_tokenizers_sizes_must_agree(folder, other):
    with pytest.raises(ConfigError, match="272 tokens and the target's 264"):
        LLM(folder, speculative_config=config_of(other), skip_tokenizer_init=True, **SMALL)
    with LLM(folder, speculative_config=config_of(folder), skip_tokenizer_init=True, **SMALL) as llm:
        assert llm.generate([{"prompt_token_ids": [97, 98]}], use_tqdm=False)
