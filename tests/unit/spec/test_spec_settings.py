"""What a person may say about speculation."""

import pytest

from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.guarded import GuardedDrafter
from tiercel.spec.drafters.ngram import NgramDrafter
from tiercel.spec.drafters.suffix import SuffixDrafter
from tiercel.spec.settings import SpeculationSettings

read = SpeculationSettings.from_options


def test_auto_is_suffix_drafting_of_what_pays():
    settings = read("auto", {})
    assert (settings.method, settings.is_asked, settings.is_adaptive, settings.n_tokens_max) == (
        "suffix",
        False,
        True,
        24,
    )
    assert isinstance(settings.make_drafter(), SuffixDrafter)


def test_off_needs_no_room():
    settings = read("off", {})
    assert settings.method is None
    assert settings.n_rows_max(8) == 0


def test_vllms_words_for_ngrams():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    settings = read("auto", config)
    assert settings.is_asked
    assert settings.lookup == (2, 4)
    assert settings.n_tokens_max == 3
    assert isinstance(settings.make_drafter(), NgramDrafter)
    assert read("ngram", {}).lookup == (5, 5)
    assert read("ngram", {"prompt_lookup_min": 3}).lookup == (3, 3)


def test_vllms_words_for_suffixes():
    config = {"suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_spec_factor": 2, "adaptive": False}
    settings = read("suffix", config)
    assert settings.make_drafter().depth == 12
    assert not settings.is_adaptive


def test_vllms_words_for_verification():
    settings = read("auto", {})
    assert (settings.verification, settings.draws) == ("matching", "coupled")
    for how in ("standard", "block"):
        settings = read("dspark", {"model": "x", "rejection_sample_method": how})
        assert (settings.verification, settings.draws) == (how, "apart")
    greedy = {"model": "x", "draft_sample_method": "greedy"}
    assert read("dspark", greedy).draws == "likeliest"
    assert read("dspark", greedy | {"rejection_sample_method": "standard"}).draws == "likeliest"
    assert read("auto", {"rejection_sample_method": "standard"}).method == "suffix"


def test_ranges_of_a_batch_are_read():
    settings = read("auto", {"num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 9, 2]]})
    assert settings.n_tokens_by_batch == ((1, 4, 8), (5, 9, 2))


@pytest.mark.parametrize(
    ("speculative", "config", "word"),
    [
        ("auto", {"methods": "ngram"}, "methods"),
        ("auto", {"method": "eagle3"}, "eagle3"),
        ("auto", {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ("auto", {"num_speculative_tokens": True}, "num_speculative_tokens"),
        ("auto", {"num_speculative_tokens": "3"}, "num_speculative_tokens"),
        ("ngram", {"method": "suffix"}, "contradict"),
        ("suffix", {"prompt_lookup_min": 3}, "prompt_lookup_min"),
        ("ngram", {"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ("auto", {"suffix_decoding_min_token_prob": 2}, "min_token_prob"),
        ("auto", {"adaptive": 1}, "adaptive"),
        ("auto", {"num_speculative_tokens_per_batch_size": [[2, 3, 1]]}, "1 is needed"),
        ("auto", {"num_speculative_tokens_per_batch_size": [[1, 3, 1], [2, 5, 1]]}, "range"),
        ("auto", {"num_speculative_tokens_per_batch_size": [[1, 3]]}, "range"),
        (
            "suffix",
            {"num_speculative_tokens_per_batch_size": [[1, 8, 25]]},
            "got 25 for 1 to 8 sequences; .* allows 24",
        ),
        ("ngram", {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 4]]}, "allows 3"),
        (
            "dspark",
            {"model": "x", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 4]]},
            "got 4",
        ),
        ("ngram", {"prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ("ngram", {"prompt_lookup_min": 0, "prompt_lookup_max": 3}, "prompt_lookup_min=0"),
        ("off", {"num_speculative_tokens": -4}, "num_speculative_tokens: nothing is speculated"),
        ("auto", {"method": "off", "model": "x"}, "model: nothing is speculated"),
        ("auto", {"method": "custom"}, "module_path"),
        ("auto", {"method": "custom", "module_path": "no.such.module:Drafter"}, "cannot be imported"),
        ("auto", {"method": "custom", "module_path": "json:NoSuchClass"}, "cannot be imported"),
        ("auto", {"method": "custom", "module_path": "json:JSONDecoder"}, "lacks begin, check, close"),
        ("auto", {"module_path": "json:JSONDecoder"}, "does not know it"),
        ("suffix", {"rejection_sample_method": "typical"}, "got 'typical'; matching, standard, block are there"),
        ("draft_model", {"model": "x", "rejection_sample_method": "block"}, "rejection_sample_method: the method"),
        ("dspark", {"model": "x", "draft_sample_method": "beam"}, "got 'beam'; probabilistic, greedy are there"),
        ("ngram", {"draft_sample_method": "greedy"}, "draft_sample_method: the method is ngram"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(speculative, config, word):
    with pytest.raises(ConfigError, match=word):
        read(speculative, config)


def test_a_drafter_from_outside_is_made_with_its_options_and_guarded():
    path = "tiercel.spec.drafters.ngram:NgramDrafter"
    settings = read("auto", {"method": "custom", "module_path": path, "options": {"n_min": 2, "n_max": 3}})
    drafter = settings.make_drafter()
    assert isinstance(drafter, GuardedDrafter)
    assert isinstance(drafter.inner, NgramDrafter)
    drafter.close()
    wrong = read("auto", {"method": "custom", "module_path": path, "options": {"n": 2}})
    with pytest.raises(ConfigError, match="options"):
        wrong.make_drafter()
