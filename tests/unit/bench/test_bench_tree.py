"""What stands in `benchmarks/`: each case can be run, each peer's script can be started."""

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from bench_fakes import PYTHON, continue_ids

from tiercel.base.config import EngineOptions
from tiercel.bench import rows, table
from tiercel.bench.cases import load_case
from tiercel.bench.contest import Request
from tiercel.bench.context import ContextWork
from tiercel.bench.latency import LatencyWork
from tiercel.bench.ops import OpsWork
from tiercel.bench.peers import Peer, PeerFailed, about, peer_command
from tiercel.bench.served import ServedWork
from tiercel.bench.speculative import SpeculativeWork
from tiercel.bench.throughput import ThroughputWork

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CASES = sorted((BENCHMARKS / "cases").glob("*.toml"))
PEERS = sorted(path.stem for path in (BENCHMARKS / "peers").glob("*.py") if path.stem != "loop")
WORKS = {
    "context": ContextWork,
    "latency": LatencyWork,
    "throughput": ThroughputWork,
    "ops": OpsWork,
    "startup": None,
    "served": ServedWork,
}
SHARED = {"model", "num_iters", "num_iters_warmup", "agree_tokens", "seed"}


def names(kind):
    return set() if kind is None else {field.name for field in fields(kind)}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_says_what_it_measures_and_its_traps(path):
    bench = next(name for name in WORKS if f'bench = "{name}"' in path.read_text())
    case = load_case(path, bench)
    work = SpeculativeWork if case.work.get("compare_speculative") else WORKS[bench]
    assert set(case.work) <= names(work) | names(EngineOptions) | SHARED
    assert case.kind == "info" or case.reach
    assert path.read_text().startswith("# ")


def test_rows_that_stand_in_the_tree_can_be_read():
    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        for row in rows.read(path):
            assert row["contestants"]["tiercel"]["outputs"]
            assert "/home/" not in json.dumps(row)
            assert "/root/" not in json.dumps(row)


def test_the_readme_shows_the_table_of_the_rows_that_stand_in_the_tree():
    readme = (BENCHMARKS.parent / "README.md").read_text()
    made = table.markdown(row for path in sorted((BENCHMARKS / "results").glob("*.jsonl")) for row in rows.read(path))
    assert table.put_into(readme, made) == readme, "run `make table`"


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_script_starts_and_tells_versions_or_that_its_package_is_missing(name):
    command = peer_command(name, PYTHON, BENCHMARKS / "peers")
    try:
        told = set(about(name, command))
    except PeerFailed as failure:
        told = {failure.kind}
    assert told & {"python", "missing"}


RULE = """
PACKAGES = ("pytest",)

class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        print("loading", model)
        if model == "bad":
            raise ValueError("no such file")
        if model == "missing":
            import no_such_package_anywhere
        self.config = {"n_threads": n_threads}

    def generate(self, requests):
        print("noise on standard output")
        done = []
        for ids, n in requests:
            found = list(ids)
            for _ in range(n):
                found.append((31 * sum(found) + len(found)) % 997)
            done.append(found[len(ids):])
        return done, None

    def first_text(self, prompt):
        print("noise")
        return prompt.upper()
"""


@pytest.fixture
def command(tmp_path):
    shutil.copy(BENCHMARKS / "peers/loop.py", tmp_path)
    (tmp_path / "rule.py").write_text(RULE)
    return peer_command("rule", PYTHON, tmp_path)


def test_the_loop_speaks_the_protocol_whatever_a_library_prints(command):
    with Peer("rule", command, n_threads=2, deadline_s=20) as peer:
        peer.load(Path("good"), max_len_tokens=8, max_num_seqs=1)
        assert "pytest" in peer.versions
        run = peer.generate([Request((1, 2), 3)])
    assert run.token_ids == (continue_ids([1, 2], 3),)
    assert run.elapsed_s > 0


@pytest.mark.parametrize(("model", "kind"), [("bad", "refused"), ("missing", "missing")])
def test_the_loop_answers_what_goes_wrong(command, model, kind):
    with Peer("rule", command, n_threads=2, deadline_s=20) as peer:
        with pytest.raises(PeerFailed) as failure:
            peer.load(Path(model), max_len_tokens=8, max_num_seqs=1)
        assert failure.value.kind == kind


def test_the_loop_answers_once_with_the_first_token_only(command):
    ended = subprocess.run(
        [*command, "--once", "good", "hi", "2"], capture_output=True, text=True, timeout=20, check=True
    )
    assert ended.stdout == "HI"


def test_the_loop_tells_versions(command):
    assert "pytest" in about("rule", command)
