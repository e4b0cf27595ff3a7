"""Tiers as people name them: `LLM(kv_tiers=...)`, flags and files, over a restart of the whole engine."""

import asyncio
import io
import json
import os
import re

import httpx
import pytest
from test_kimi_llm import MODELS as KIMI
from test_recurrent_llm import TEXT
from test_speculation_llm import CASES, REASONING
from test_speculation_llm import all_of as case_of

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.base.config import EngineOptions, engine_options
from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.cli.main import main
from tiercel.protocol.beams import BeamSearchParams
from tiercel.testing.tiny_model import write_tiny_model

SMALL = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64, "reasoning_config": REASONING}
IDS = [(11 * i) % 250 for i in range(100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, monkeypatch):
    """Digests of models are remembered there."""
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def tier(path, **more):
    # A busy machine is given its time: what is late is computed, which is right and not what is looked at here.
    patience = {"load_deadline_s": 600.0, "lookup_deadline_s": 600.0}
    return {"type": "disk", "path": str(path), "capacity": "64MiB", "store_sights": 1} | patience | more


def answer(llm, params=GREEDY):
    (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    return output, (output.outputs[0].token_ids, output.outputs[0].logprobs)


def test_a_prompt_outlives_the_engine_bit_for_bit(folder, tmp_path):
    with LLM(str(folder), **SMALL) as llm:
        plain, want = answer(llm)
        assert plain.cached_by_tier is None
    with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL) as llm:
        first, got = answer(llm)
        assert got == want
        assert first.cached_by_tier == {}
    with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL) as llm:
        second, got = answer(llm)
        assert got == want
        assert second.num_cached_tokens == 96
        assert second.cached_by_tier == {"1:disk": 96}
        counts = llm.stats()["tier 1:disk"]
        assert counts["n_pages_landed"] == 6
        assert counts["used_bytes"] > 0
        assert llm.reset_prefix_cache()
        assert llm.client.reset_prefix_cache()
        third, got = answer(llm)
        assert got == want
        assert third.num_cached_tokens == 0
    assert (tmp_path.stat().st_mode & 0o077) in (0, 0o055)  # the folder is the person's; what is in it is not others'
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.rglob("*"))


def test_every_kind_of_request_gets_over_restarts_what_it_gets_without_tiers(folder, tmp_path):
    """Sampled, penalised, formed, scored and several at once; and beams, which share pages as they fork."""

    def all_of(tiers):
        with LLM(str(folder), kv_tiers=tiers, speculative="off", **SMALL) as llm:
            found = {name: case_of(llm, case, max_tokens=20) for name, case in CASES.items()}
            beams = llm.beam_search([{"prompt_token_ids": IDS}], BeamSearchParams(beam_width=3, max_tokens=12))
            found["beams"] = [(beam.tokens, beam.cum_logprob) for beam in beams[0].sequences]
            return found, llm.stats().get("tier 1:disk", {}).get("n_pages_landed")

    want, _ = all_of([])
    for turn in range(2):
        got, n_landed = all_of([tier(tmp_path)])
        assert got == want
        assert (n_landed > 10) == (turn == 1)


@pytest.mark.anyio
async def test_usage_and_metrics_tell_over_http_what_came_from_disk(folder, tmp_path):
    for n_loaded in (0, 96):
        with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL) as llm:
            facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
            app = make_app(facade, ServerSettings(served_names=("tiny",)))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
                body = {"model": "tiny", "prompt": IDS, "max_tokens": 2}
                usage = (await client.post("/v1/completions", json=body)).json()["usage"]
                for _ in range(200):  # the engine tells when it comes to rest, which may be after the answer
                    metrics = (await client.get("/metrics")).text
                    if re.search(rf"kv_tier_pages_landed_total.* {n_loaded / 16}$", metrics, re.MULTILINE):
                        break
                    await asyncio.sleep(0.02)
            app.service.close()
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == n_loaded
        assert details["cached_tokens_by_tier"].get("1:disk", 0) == n_loaded
        told = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if 'tier="1:disk"' in line}
        assert told["tiercel:kv_tier_pages_landed_total"] == n_loaded / 16
        assert told["vllm:kv_offload_tiering_chunk_hits_total"] >= n_loaded / 16
        assert told["tiercel:kv_tier_capacity_bytes"] == 64 << 20
        assert (told["vllm:kv_offload_load_bytes_total"] > 0) == (n_loaded > 0)


HYBRIDS = {"qwen3_5": TEXT, **KIMI}


@pytest.mark.parametrize("config", HYBRIDS.values(), ids=HYBRIDS)
def test_a_hybrid_models_prompt_outlives_the_engine_bit_for_bit_with_its_state(config, tmp_path):
    hybrid = str(write_tiny_model(tmp_path / "hybrid", config=config))
    with LLM(hybrid, **SMALL) as llm:
        want = answer(llm)[1]
        assert llm.client.snapshot.n_snapshots > 0
    for n_cached in (0, 96):
        with LLM(hybrid, kv_tiers=[tier(tmp_path / "kv")], **SMALL) as llm:
            output, got = answer(llm)
            assert got == want
            assert output.num_cached_tokens == n_cached
    assert output.cached_by_tier == {"1:disk": 96}
    groups = [group["name"] for group in json.loads(next((tmp_path / "kv").rglob("about.json")).read_text())["groups"]]
    assert len(groups) == 2


def test_a_model_whose_weights_were_changed_in_place_finds_nothing(tmp_path):
    """In the middle of a large tensor, with its file's times put back: what names pages in memory does not see that."""
    model = write_tiny_model(tmp_path / "tiny", config={"vocab_size": 4096})
    with LLM(str(model), kv_tiers=[tier(tmp_path / "kv")], **SMALL) as llm:
        answer(llm)
        identity = llm.engine.plan.identity
    file = model / "model.safetensors"
    data, times = bytearray(file.read_bytes()), file.stat()
    place = largest_tensor_of(data)
    data[place : place + 2048] = bytes(2048)
    with file.open("r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    for n_cached in (0, 96):
        with LLM(str(model), kv_tiers=[tier(tmp_path / "kv")], **SMALL) as llm:
            assert llm.engine.plan.identity == identity
            assert answer(llm)[0].num_cached_tokens == n_cached


def largest_tensor_of(data):
    """Give where the middle of a safetensors file's largest tensor lies."""
    n_header = int.from_bytes(data[:8], "little")
    entries = [entry for name, entry in json.loads(data[8 : 8 + n_header]).items() if name != "__metadata__"]
    start, end = max((entry["data_offsets"] for entry in entries), key=lambda place: place[1] - place[0])
    assert end - start > 3 * 16384
    return 8 + n_header + (start + end) // 2


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "float32"}, {"block_size": 32}])
def test_pages_of_another_type_or_size_are_not_found(folder, tmp_path, changes):
    with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL) as llm:
        answer(llm)
    for _ in range(2):
        with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL, **changes) as llm:
            output, _ = answer(llm)
            n_cached = output.num_cached_tokens
    assert n_cached == 96  # of its own, from the second start on
    with LLM(str(folder), kv_tiers=[tier(tmp_path)], **SMALL) as llm:
        assert answer(llm)[0].cached_by_tier == {"1:disk": 96}


def test_a_tier_in_memory_and_one_on_disk_follow_each_other(folder, tmp_path):
    tiers = [{"type": "memory", "capacity": "1MiB", "store_sights": 1}, tier(tmp_path)]
    with LLM(str(folder), kv_tiers=tiers, **SMALL) as llm:
        want = answer(llm)[1]
    with LLM(str(folder), kv_tiers=tiers, **SMALL) as llm:
        output, got = answer(llm)
    assert got == want
    assert output.cached_by_tier == {"2:disk": 96}


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([{"type": "disk", "path": "x", "capacity": "1GiB", "colour": "red"}], r"kv_tiers\[0\]\.colour: unknown"),
        ([{"type": "tape", "capacity": "1GiB"}], r"kv_tiers\[0\]\.type: got 'tape'"),
        ([{"type": "disk", "path": "x"}], "capacity"),
        ([{"type": "disk", "path": "x", "capacity": "1B"}], "one object of this model takes"),
        ("disk", "kv_tiers: got 'disk'; needs a list"),
        (["disk"], "kv_tiers: got 'disk'; needs an object"),
    ],
)
def test_what_is_no_tier_is_refused_by_name(folder, tiers, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), kv_tiers=tiers, **SMALL)


def test_tiers_without_prefix_caching_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"kv_tiers.*prefix caching is off"):
        LLM(str(folder), kv_tiers=[tier(tmp_path)], enable_prefix_caching=False, **SMALL)


def test_offloading_size_makes_more_pages(folder):
    sizes = []
    for size in (None, 0.001):
        with LLM(str(folder), kv_offloading_size=size, **SMALL) as llm:
            sizes.append(llm.client.snapshot.n_pages)
            page_bytes = llm._engine.plan.capacity.page_bytes
    assert sizes[1] - sizes[0] == int(0.001 * (1 << 30)) // page_bytes


def test_an_offloading_size_beyond_memory_is_refused(folder):
    with pytest.raises(OutOfPages, match="kv_offloading_size"):
        LLM(str(folder), kv_offloading_size=1e6, **SMALL)


def test_flag_file_and_keyword_say_the_same(folder, tmp_path, capsys, monkeypatch):
    tiers = [tier(tmp_path / "kv")]
    config = tmp_path / "engine.yaml"
    config.write_text(f"kv_tiers:\n  - {json.dumps(tiers[0])}\nthreads: 1\n")
    words = ["run", str(folder), "--raw", "--max-tokens", "2", "--stats", "x" * 70]
    for source in (["--config", str(config)], ["--kv-tiers", json.dumps(tiers), "--threads", "1"]):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert main([*words, *source]) == 0
        told = capsys.readouterr().err
        assert "tier 1:disk: " in told
    assert "n_pages_landed 4" in told
    assert engine_options(kv_tiers=tiers) == EngineOptions(kv_tiers=tiers)


@pytest.mark.parametrize("text", ["[1]", '"disk"', "[", '[{"type": "disk", "type": "disk"}]'])
def test_a_flag_that_is_no_list_of_objects_is_refused(folder, text, capsys):
    assert main(["run", str(folder), "hi", "--kv-tiers", text]) == 2
    assert "kv-tiers" in capsys.readouterr().err
