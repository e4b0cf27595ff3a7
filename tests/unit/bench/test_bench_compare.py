import json
import random

import pytest

from tiercel.base.errors import ConfigError
from tiercel.bench.compare import compare, load
from tiercel.cli import main


def result(*, scale=1.0, n=200, seed=0, noise=0.02, text="same", temperature=0.0, prompts="p", n_failed=0):
    source = random.Random(seed)
    ttfts = [scale * 0.1 * source.uniform(1 - noise, 1 + noise) for _ in range(n)]
    e2els = [scale * source.uniform(1 - noise, 1 + noise) for _ in range(n)]
    starts = [i * 0.1 * scale for i in range(n)]
    return {
        "duration": starts[-1] + max(e2els),
        "config": {"load": {"temperature": temperature}, "prompts_digest": prompts},
        "starts": starts,
        "ttfts": ttfts,
        "tpots": [scale * 0.01 * source.uniform(1 - noise, 1 + noise) for _ in range(n)],
        "e2els": e2els,
        "output_lens": [32] * n,
        "generated_texts": [text] * n,
        "errors": ["died: x" if i < n_failed else "" for i in range(n)],
    }


def verdicts(found):
    return {finding.measure: finding.verdict for finding in found.findings}


def test_the_same_server_twice_passes():
    found = compare(result(seed=1), result(seed=2))
    assert found.verdict == "pass"
    assert set(verdicts(found).values()) == {"same"}
    assert found.n_texts == 200


def test_a_slower_server_fails_in_every_measure():
    found = compare(result(seed=1), result(seed=2, scale=1.3))
    assert found.verdict == "fail"
    assert set(verdicts(found).values()) == {"worse"}


def test_a_faster_server_passes_and_is_better():
    found = compare(result(seed=1), result(seed=2, scale=0.7))
    assert found.verdict == "pass"
    assert set(verdicts(found).values()) == {"better"}


def test_a_gain_near_the_tolerance_is_no_worse():
    found = compare(result(seed=1, noise=0.1), result(seed=2, noise=0.1, scale=0.95))
    assert verdicts(found)["median_e2el_ms"] == "no worse"


def test_a_few_noisy_requests_are_unclear():
    assert compare(result(n=6, noise=0.9, seed=1), result(n=6, noise=0.9, seed=2)).verdict == "unclear"


def test_a_change_within_the_tolerance_is_none():
    assert compare(result(seed=1), result(seed=2, scale=1.3), tolerance_frac=0.5).verdict == "pass"


def test_greedy_texts_that_differ_fail():
    after = result(seed=2)
    after["generated_texts"][7] = "other"
    found = compare(result(seed=1), after)
    assert (found.verdict, list(found.differing)) == ("fail", [7])


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"prompts": "others"}])
def test_texts_that_need_not_be_the_same_are_not_compared(change):
    found = compare(result(seed=1), result(seed=2, text="other", **change))
    assert found.why_no_texts is not None
    assert found.verdict == "pass"


def test_more_failed_requests_fail():
    assert compare(result(seed=1), result(seed=2, n_failed=1)).verdict == "fail"
    assert compare(result(seed=1, n_failed=1), result(seed=2)).verdict == "pass"


def test_nothing_measured_is_no_pass():
    assert compare(result(n=2, n_failed=2), result(n=2, n_failed=2)).verdict == "unclear"


def test_the_command_tells_the_verdict_by_its_exit_code(tmp_path, capsys):
    for name, told in (("a", result(seed=1)), ("b", result(seed=2)), ("c", result(seed=3, scale=2.0))):
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    assert main.main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "verdict: pass" in capsys.readouterr().out
    assert main.main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 1
    assert "verdict: fail" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ttfts": []}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        load(tmp_path / "x.json")


def test_results_of_unequal_lists_are_refused(tmp_path):
    told = result()
    told["ttfts"].pop()
    (tmp_path / "x.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"x\.json"):
        load(tmp_path / "x.json")
