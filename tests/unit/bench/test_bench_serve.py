import json

import fake_servers
import pytest
from fake_servers import FakeServer
from hypothesis import given
from hypothesis import strategies as st

from tiercel.base.errors import ConfigError
from tiercel.bench import serve, traffic
from tiercel.bench.http_client import read_url
from tiercel.bench.serve import Answer, Load
from tiercel.bench.traffic import Traffic
from tiercel.cli import main

SMALL = ["--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "3", "--timeout", "20"]


def words(url, *more):
    return ["bench", "serve", "--base-url", url, *SMALL, *more]


def test_a_good_server_is_measured(capsys, no_checkout, tmp_path):
    saved = tmp_path / "a.json"
    with FakeServer(fake_servers.good) as server:
        page = tmp_path / "a.html"
        assert main.main(words(server.url, "--save-result", str(saved), "--report", str(page), "--seed", "3")) == 0
        assert {body["model"] for _, body in server.asked} == {"m"}
        assert all(body["max_tokens"] == 3 and body["temperature"] == 0.0 for _, body in server.asked)
    told = json.loads(saved.read_text())
    assert (told["completed"], told["failed"], told["failures"]) == (4, 0, {})
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (28, 12)
    assert told["generated_texts"] == [" t0 t1 t2"] * 4
    assert all(len(gaps) == 2 for gaps in told["itls"])
    assert told["mean_ttft_ms"] > 0
    assert told["p99_e2el_ms"] >= told["median_e2el_ms"]
    assert "<svg" in page.read_text()
    assert "Traceback" not in capsys.readouterr().err


def metrics(n_hits, n_loads, load_s):
    """A page as ours shows it: 100 tokens looked up a hit, and a tier that had half of the pages it was asked for."""
    counters = {
        "vllm:prefix_cache_queries": ("", 100 * n_hits),
        "vllm:prefix_cache_hits": ("", 25 * n_hits),
        "vllm:kv_offload_tiering_chunk_queries": (',tier="1:disk"', 8 * n_loads),
        "vllm:kv_offload_tiering_chunk_hits": (',tier="1:disk"', 4 * n_loads),
        "vllm:kv_offload_load_time": (',tier="1:disk"', load_s),
        "vllm:kv_offload_load_bytes": (',tier="1:disk"', 1e9 * load_s),
        "tiercel:kv_tier_loads": (',tier="1:disk"', n_loads),
        "tiercel:kv_tier_deadlines": (',tier="1:disk"', n_loads - 1),
    }
    lines = [
        f'# TYPE {name}_total counter\n{name}_total{{model_name="m"{tier}}} {value}\n'
        for name, (tier, value) in counters.items()
    ]
    return "".join(lines).encode()


def test_what_the_servers_caches_did_meanwhile_is_told(capsys, no_checkout):
    with FakeServer(fake_servers.good, [metrics(3, 1, 0.5), metrics(7, 5, 0.7)]) as server:
        assert main.main(words(server.url, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prefix_cache_hit_rate"] == 0.25
    assert told["kv_tier_1:disk_hit_rate"] == 0.5
    assert told["kv_tier_1:disk_loads"] == 4
    assert told["kv_tier_1:disk_mean_load_ms"] == pytest.approx(50)
    assert told["kv_tier_1:disk_load_bytes_per_s"] == pytest.approx(1e9)
    assert told["kv_tier_1:disk_deadlines"] == 4


@pytest.mark.parametrize("page", [None, b"\xff\xfe", b"no metrics { at all", b"up 1\n"])
def test_a_server_whose_metrics_say_nothing_of_caches_is_measured_all_the_same(capsys, no_checkout, page):
    with FakeServer(fake_servers.good, [page, page]) as server:
        assert main.main(words(server.url, "--json")) == 0
    assert not any("cache" in name or "tier" in name for name in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ("dies", "died"),
        ("dies_at_once", "died"),
        ("error_in_stream", "died"),
        ("no_end", "died"),
        ("no_http", "garbage"),
        ("no_json", "garbage"),
        ("no_completion", "garbage"),
        ("busy", "status"),
        ("empty", "short"),
    ],
)
def test_what_goes_wrong_is_counted_by_kind_and_the_exit_code_is_1(capsys, no_checkout, behaviour, kind):
    with FakeServer(getattr(fake_servers, behaviour)) as server:
        assert main.main(words(server.url, "--json")) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["completed"], told["failed"], told["failures"]) == (0, 4, {kind: 4})
    assert all(error.startswith(f"{kind}: ") for error in told["errors"])
    assert "Traceback" not in said.err


def test_a_server_that_says_nothing_is_stalled(capsys, no_checkout):
    with FakeServer(fake_servers.stalls) as server:
        assert main.main([*words(server.url)[:-1], "0.1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failures"] == {"stalled": 4}


def test_some_requests_may_fail_and_the_others_count(capsys, no_checkout):
    with FakeServer(fake_servers.dies_now_and_then) as server:
        assert main.main(words(server.url, "--max-concurrency", "1", "--json")) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["completed"], told["failures"]) == (2, {"died": 2})
    assert told["max_concurrent_requests"] == 1
    assert told["total_output_tokens"] == 6


def test_a_server_that_is_not_there_is_refused(capsys, no_checkout, closed_url):
    assert main.main(words(closed_url, "--model", "m", "--json")) == 1
    assert json.loads(capsys.readouterr().out)["failures"] == {"refused": 4}
    assert main.main(words(closed_url)) == 1
    assert "refused" in capsys.readouterr().err


def test_a_key_of_the_environment_is_sent_and_told_nowhere(capsys, no_checkout, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with FakeServer(fake_servers.good) as server:
        assert main.main(words(server.url, "--json")) == 0
        assert "authorization: bearer sesame" in server.asked[0][0].lower()
    said = capsys.readouterr()
    assert "sesame" not in said.out + said.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--base-url", "ftp://x"], "base-url"),
        (["--backend", "grpc"], "openai, openai-chat"),
        (["--dataset-name", "sonnet"], "random, prefix_repetition, custom"),
        (["--dataset-name", "custom"], "dataset-path"),
        (["--request-rate", "0"], "request-rate"),
        (["--burstiness", "-1"], "burstiness"),
        (["--max-concurrency", "0"], "max-concurrency"),
        (["--goodput", "speed:3"], "goodput"),
        (["--metric-percentiles", "101"], "percentiles"),
        (["--num-prompts", "0"], "num-prompts"),
    ],
)
def test_a_wrong_flag_is_told_and_exits_with_2(capsys, no_checkout, flags, said):
    assert main.main(["bench", "serve", *flags]) == 2
    assert said in capsys.readouterr().err


def answer(ttft=0.1, itl=(0.05, 0.15), n_output=3, **changes):
    fields = {"sent_s": 0.0, "ttft_s": ttft, "itl_s": list(itl), "e2el_s": ttft + sum(itl), "n_output": n_output}
    return Answer(**(fields | {"n_input": 4} | changes))


def test_the_measures_mean_what_vllms_mean():
    told = serve.summarise([answer(), answer(failure="died")], 2.0, Load(goodput={"ttft": 100, "tpot": 99}))
    assert told["output_throughput"] == 1.5
    assert told["total_token_throughput"] == 3.5
    assert told["median_tpot_ms"] == pytest.approx(100)
    assert told["mean_itl_ms"] == pytest.approx(100)
    assert told["request_goodput"] == 0.0
    assert (told["completed"], told["failed"]) == (1, 1)


def test_one_output_token_has_no_time_per_output_token():
    told = serve.summarise([answer(itl=(), n_output=1)], 1.0, Load())
    assert "mean_tpot_ms" not in told
    assert "mean_itl_ms" not in told
    assert told["mean_ttft_ms"] == pytest.approx(100)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda at: (at[0], at[0] + at[1])), max_size=12))
def test_most_at_once_is_the_most_at_any_moment(spans):
    at_any = [sum(start <= now < end for start, end in spans) for now in range(30)]
    assert serve.most_at_once(spans) == max(at_any)


@given(st.integers(0, 99), st.floats(0.1, 50), st.floats(0.1, 10), st.integers(2, 60))
def test_requests_are_sent_at_the_asked_rate(seed, rate, burstiness, n):
    times = traffic.send_times(Traffic(request_rate=rate, burstiness=burstiness, seed=seed), n)
    assert times == sorted(times)
    assert times[-1] == pytest.approx((n - 1) / rate)


def test_without_a_rate_all_are_sent_at_once():
    assert traffic.send_times(Traffic(), 3) == [0.0, 0.0, 0.0]


def test_the_same_seed_gives_the_same_requests():
    assert traffic.queries(Traffic(seed=1)) == traffic.queries(Traffic(seed=1))
    assert traffic.queries(Traffic(seed=1)) != traffic.queries(Traffic(seed=2))


def test_prefixes_are_shared_in_turn():
    made = traffic.queries(
        Traffic(
            dataset_name="prefix_repetition", num_prompts=6, num_prefixes=2, random_prefix_len=8, random_input_len=2
        )
    )
    starts = [query.prompt.split()[:8] for query in made]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]


@pytest.mark.parametrize("line", ["{", '{"text": "x"}', '{"prompt": 3}', '{"prompt": "x", "output_len": 0}', "[]"])
def test_a_wrong_line_of_custom_data_is_told(tmp_path, line):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"d\.jsonl:2"):
        traffic.queries(Traffic(dataset_name="custom", dataset_path=path))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("localhost:9/x/", ("localhost", 9, False, "/x")),
        ("https://example.invalid", ("example.invalid", 443, True, "")),
    ],
)
def test_an_address_is_read(url, told):
    server = read_url(url)
    assert (server.host, server.port, server.is_tls, server.base_path) == told


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="base-url"):
        read_url(url)
