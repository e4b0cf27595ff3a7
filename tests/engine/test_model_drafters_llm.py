"""Drafters that are models, through `LLM` on the native runner: every output is the one without."""

import json

import pytest
from safetensors.numpy import load_file, save_file
from test_kimi_llm import KIMI_K3
from test_more_models_llm import LFM2, LING
from test_recurrent_llm import TEXT as QWEN3_5
from test_speculation_llm import CASES, PROMPTS, SMALL, all_of

from tiercel import LLM, SamplingParams
from tiercel.base.errors import ConfigError, ModelFileError, ModelNotFound, UnsupportedModel
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.tiny_drafter import KINDS, write_tiny_drafter, write_tiny_latent_drafter
from tiercel.testing.tiny_model import CONFIG, LATENT_CONFIG, write_tiny_model

IDS = range(97, 105)
DENSE = {"num_hidden_layers": 5}
MTP = {
    "deepseek": LATENT_CONFIG | {"num_nextn_predict_layers": 1},
    "deepseek-2": LATENT_CONFIG | {"num_nextn_predict_layers": 2},
    "qwen3.5": QWEN3_5 | {"mtp_num_hidden_layers": 1},
    "qwen3.5-2": QWEN3_5 | {"mtp_num_hidden_layers": 2},
    "ling": LING | {"num_nextn_predict_layers": 1},
    "ling-3": LING | {"num_nextn_predict_layers": 3},
    "kimi-k3": KIMI_K3 | {"num_nextn_predict_layers": 1},
    "kimi-k3-2": KIMI_K3 | {"num_nextn_predict_layers": 2},
}
# Each kind beside states and beside latent rows; LING has both.
ON_OTHERS = {
    "dflash2-lfm2": LFM2,
    "dflash2-deepseek": LATENT_CONFIG | {"num_hidden_layers": 4},
    "dspark-qwen3.5": QWEN3_5,
    "dspark-deepseek": LATENT_CONFIG | {"num_hidden_layers": 4},
    "eagle3-ling": LING,
}
TURN = SamplingParams(temperature=0.7, seed=2, max_tokens=45, ignore_eos=True, logprobs=1, allowed_token_ids=list(IDS))


def of_few_tokens(folder, config):
    """Have a model, and its draft head that shares its head, say little but IDS: so drafts of chance come sometimes."""
    weights = tiny_checkpoint({**CONFIG, **config}, has_mtp=True)
    head = weights["lm_head.weight"]
    head[[i for i in range(len(head)) if i not in IDS]] *= 0.02
    save_file(weights, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module", params=[*KINDS, *ON_OTHERS, *MTP, "kimi-k3-dspark"])
def pair(request, tmp_path_factory):
    """A model's folder, and what is said of its drafter."""
    root, kind = tmp_path_factory.mktemp("pair"), request.param
    if kind in MTP:
        folder = write_tiny_model(root / "model", config=MTP[kind])
        return str(of_few_tokens(folder, MTP[kind])), {"method": "mtp"}
    if kind == "kimi-k3-dspark":
        folder = of_few_tokens(write_tiny_model(root / "model", config=KIMI_K3), KIMI_K3)
        return str(folder), {"model": str(write_tiny_latent_drafter(root / "drafter", folder, IDS))}
    folder = write_tiny_model(root / "model", config=ON_OTHERS.get(kind, DENSE))
    return str(folder), {"model": str(write_tiny_drafter(root / "drafter", kind.split("-")[0], folder, IDS))}


@pytest.fixture(scope="module")
def plain(pair):
    with LLM(pair[0], speculative="off", **SMALL) as llm:
        return {name: all_of(llm, case) for name, case in CASES.items()}


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["always", "adaptive"])
def test_every_output_is_the_one_without_drafts(pair, plain, is_adaptive):
    """Greedy and sampled, forms, penalties, log-probabilities, stops inside what was drafted, prompts in chunks."""
    with LLM(pair[0], speculative_config=pair[1] | {"adaptive": is_adaptive}, **SMALL) as llm:
        for name, case in CASES.items():
            assert all_of(llm, case) == plain[name], name
        counts = llm.stats()
        assert counts["n_failures"] == 0
        if not is_adaptive:
            assert counts["n_accepted_tokens"] > 40
            assert counts["n_draft_tokens"] > counts["n_accepted_tokens"]
            assert sum(counts["n_accepted_by_position"][1:]) > 0


@pytest.mark.parametrize("case", ["greedy", "told sampled"])
def test_a_pool_that_preempts_changes_nothing(pair, case):
    with LLM(pair[0], speculative="off", max_model_len=192, **SMALL) as llm:
        want = all_of(llm, CASES[case], max_tokens=80)
    with LLM(pair[0], speculative_config=pair[1] | {"adaptive": False}, max_model_len=192, **SMALL) as llm:
        token_bytes = llm.engine.plan.info.kv_bytes_per_token()
    small = {"kv_cache_memory_bytes": int(1.3 * 192 * token_bytes), "max_model_len": 192}
    with LLM(pair[0], speculative_config=pair[1] | {"adaptive": False}, **SMALL, **small) as llm:
        assert all_of(llm, CASES[case], max_tokens=80) == want
        assert llm.stats()["n_total_preemptions"] > 0


def turns(llm):
    """A chat of four turns, each of which goes on from what the one before left."""
    ids, found = list(range(5, 45)), []
    for i in range(4):
        (output,) = llm.generate([{"prompt_token_ids": ids}], TURN, use_tqdm=False)
        found.append(output)
        ids = ids + list(output.outputs[0].token_ids) + list(range(60 + i, 67 + i))
    return found


def told(outputs):
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_a_chat_goes_on_from_kept_pages_and_after_a_restart_from_a_tier(pair, tmp_path):
    """The drafter's keys and values are in the pages, so it drafts on as if it had read all."""
    patience = {"load_deadline_s": 600.0, "lookup_deadline_s": 600.0}
    tiers = [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "store_sights": 1} | patience]
    with LLM(pair[0], speculative="off", **SMALL) as llm:
        wanted = turns(llm)
    accepted = []
    for _ in range(2):
        with LLM(pair[0], speculative_config=pair[1] | {"adaptive": False}, kv_tiers=tiers, **SMALL) as llm:
            found = turns(llm)
            accepted.append(llm.stats()["n_accepted_by_position"])
        assert told(found) == told(wanted)
    assert found[0].cached_by_tier["1:disk"] > 0
    assert found[-1].num_cached_tokens > 150
    if pair[1].get("method") != "mtp":  # whose page's last place knows a token of the turn that filled it
        assert accepted[0] == accepted[1]


def test_pages_with_a_drafters_layers_are_of_another_model(pair, tmp_path):
    tiers = [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "store_sights": 1}]
    with LLM(pair[0], speculative_config=pair[1], kv_tiers=tiers, **SMALL) as llm:
        turns(llm)
    with LLM(pair[0], speculative="off", kv_tiers=tiers, **SMALL) as llm:
        found = turns(llm)
    assert found[0].num_cached_tokens == 0


def test_requests_that_are_left_in_the_middle_of_drafts_harm_no_other(pair, plain):
    with LLM(pair[0], speculative_config=pair[1] | {"adaptive": False}, **SMALL) as llm:
        params = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.0)
        for n_read in (1, 3):
            handles = [llm.client.submit(prompt, params) for prompt in PROMPTS[:3]]
            for handle in handles[:2]:
                for _ in range(n_read):
                    next(handle, None)  # it may have ended: what nobody read meanwhile comes in one piece
                handle.close()
            assert all_of(llm, CASES["greedy"]) == plain["greedy"]
            handles[2].close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "dense", config=DENSE)


def refused(folder, **config):
    return LLM(str(folder), speculative_config=config, **SMALL)


def test_what_is_no_drafter_for_this_model_is_refused_by_name(dense, tmp_path):
    drafter = write_tiny_drafter(tmp_path / "drafter", "dspark", dense, IDS)
    with pytest.raises(ConfigError, match=r"speculative_config\.method: got dflash"):
        refused(dense, method="dflash", model=str(drafter))
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: got 6"):
        refused(dense, model=str(drafter), num_speculative_tokens=6)
    ranges = [[1, 2, 5], [3, 9, 6]]
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: got 6"):
        refused(dense, model=str(drafter), num_speculative_tokens_per_batch_size=ranges)
    with pytest.raises(UnsupportedModel, match=r'LlamaForCausalLM.*say "method": "draft_model"'):
        refused(dense, model=str(dense))
    with pytest.raises(ConfigError, match=r"speculative_config\.model: left out"):
        refused(dense, method="dspark")
    with pytest.raises((ModelNotFound, ConfigError)):
        refused(dense, method="dspark", model=str(tmp_path / "nowhere"))
    with pytest.raises((ModelFileError, UnsupportedModel), match="draft head"):
        refused(dense, method="mtp")
    other = write_tiny_model(tmp_path / "other", config=DENSE | {"vocab_size": 300})
    with pytest.raises(ModelFileError, match="vocab_size"):
        refused(other, model=str(drafter))


def test_a_drafter_that_is_cut_short_is_refused(dense, tmp_path):
    drafter = write_tiny_drafter(tmp_path / "drafter", "dflash2", dense, IDS)
    file = drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError):
        refused(dense, model=str(drafter))


def test_drafts_whose_numbers_are_none_are_left_out_and_counted(dense, tmp_path, caplog):
    """Infinite weights are refused; finite ones may still give no number."""
    drafter = write_tiny_drafter(tmp_path / "drafter", "dspark", dense, IDS)
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] *= 1e38
    tensors["markov_head.markov_w1.weight"] *= 1e38
    save_file(tensors, str(file))
    with LLM(str(dense), speculative="off", **SMALL) as llm:
        want = all_of(llm, CASES["greedy"])
    with LLM(str(dense), speculative_config={"model": str(drafter), "adaptive": False}, **SMALL) as llm:
        for _ in range(3):
            assert all_of(llm, CASES["greedy"]) == want
        counts = llm.stats()
    assert counts["n_failures"] > 0
    assert "no numbers" in caplog.text


def test_the_kind_is_found_by_the_drafters_own_config(dense, tmp_path):
    for kind in KINDS:
        drafter = write_tiny_drafter(tmp_path / kind, kind, dense, IDS)
        assert json.loads((drafter / "config.json").read_text("utf-8"))["architectures"]
        with refused(dense, model=str(drafter)) as llm:
            assert llm.engine.plan.drafter.checkpoint.model.name == kind


def test_a_head_makes_as_many_drafts_as_it_has_modules_and_reads_no_more_of_them_than_are_asked_for(tmp_path):
    """A checkpoint that lacks one of those is refused by the tensor's name."""
    config = LATENT_CONFIG | {"num_nextn_predict_layers": 4}
    folder = write_tiny_model(tmp_path / "model", config=config)
    weights = tiny_checkpoint({**CONFIG, **config}, has_mtp=True)
    last = f"model.layers.{CONFIG['num_hidden_layers'] + 3}."
    save_file(weights, str(folder / "model.safetensors"))
    with LLM(str(folder), speculative_config={"method": "mtp"}, **SMALL) as llm:
        assert llm.engine.plan.drafter.n_draft == len(llm.engine.plan.drafter.lowered) == 4
    save_file({n: w for n, w in weights.items() if not n.startswith(last)}, str(folder / "model.safetensors"))
    with pytest.raises(ModelFileError, match=last):
        refused(folder, method="mtp")
    with LLM(str(folder), speculative_config={"method": "mtp", "num_speculative_tokens": 3}, **SMALL) as llm:
        assert len(llm.engine.plan.drafter.lowered) == 3
        assert len(llm.engine.plan.info.kv_layers) == CONFIG["num_hidden_layers"] + 3
