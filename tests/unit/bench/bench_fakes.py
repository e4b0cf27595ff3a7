"""An engine that answers by a rule, and peers as tiny scripts that speak the protocol, each with one fault or none."""

import sys
import textwrap
from pathlib import Path

from tiercel.bench.contest import Run
from tiercel.bench.rows import OURS


def next_token(ids):
    """The rule: what follows a sequence of tokens."""
    return (31 * sum(ids) + len(ids)) % 997


def continue_ids(ids, n):
    found = list(ids)
    for _ in range(n):
        found.append(next_token(found))
    return tuple(found[len(ids) :])


class FakeEngine:
    """Ours. `elapsed_s` are its turns' times, used over and over."""

    name = OURS

    def __init__(self, *, elapsed_s=(0.5,), drifts=False):
        self.versions = {"tiercel": "0"}
        self.config = {"threads": 2}
        self.model_name, self.model_path = "fake", Path("fake.gguf")
        self.vocab_size, self.n_threads, self.level = 1000, 2, "scalar"
        self.kv_token_bytes, self.weight_bytes = 100_000, 1_000_000
        self.turns = []
        self.is_closed = False
        self.drifts = drifts
        self.has_times = True
        self.is_timed = False
        self._elapsed_s = elapsed_s

    def encode(self, text):
        return [ord(char) for char in text]

    def generate(self, requests):
        self.turns.append(list(requests))
        drift = [len(self.turns)] if self.drifts else []
        ids = tuple(continue_ids([*drift, *one.token_ids], one.max_tokens) for one in requests)
        seconds = self._elapsed_s[len(self.turns) % len(self._elapsed_s)]
        firsts = tuple(seconds / 10 for _ in requests) if self.has_times else None
        return Run(ids, seconds, firsts, seconds * 0.9 if self.is_timed else None)

    def time_kernels(self):
        self.is_timed = True

    def close(self):
        self.is_closed = True


PEER = """
import json, sys, time

def continue_ids(ids, n):
    found = list(ids)
    for _ in range(n):
        found.append((31 * sum(found) + len(found)) % 997)
    return found[len(ids):]

def say(told):
    print(json.dumps(told), flush=True)

n_turns = 0
if "--once" in sys.argv:
    print("Paris", end="")
    sys.exit()
if "--about" in sys.argv:
    say({"versions": {"fake": "1"}})
    sys.exit()
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "end":
        break
    if asked["do"] == "load":
        say({"versions": {"fake": "1"}, "config": {"asked": asked}})
        continue
    n_turns += 1
    ids = [continue_ids(one["token_ids"], one["max_tokens"]) for one in asked["requests"]]
    told = {"token_ids": ids, "elapsed_s": 1.0, "first_token_s": [0.25] * len(ids)}
    if n_turns >= FROM_TURN:
        FAULT
    say(told)
"""

FAULTS = {
    "none": "pass",
    "hangs": "time.sleep(600)",
    "dies": "print('out of luck', file=sys.stderr); sys.exit(3)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "writes garbage": "print('%%% not JSON', flush=True); continue",
    "answers a list": "say([1]); continue",
    "refuses": "say({'error': 'RuntimeError: no memory'}); continue",
    "gives too few tokens": "told['token_ids'] = [row[:-1] for row in ids]",
    "gives an answer too many": "told['token_ids'] = [*ids, ids[0]]",
    "gives ids that are text": "told['token_ids'] = [['a'] for _ in ids]",
    "gives other tokens": "told['token_ids'] = [[1] * len(row) for row in ids]",
    "tells no time": "del told['elapsed_s']",
    "tells NaN": "told['elapsed_s'] = float('nan')",
    "took no time": "told['elapsed_s'] = 0.0",
}


def write_peers(folder, fault="none", *, from_turn=1):
    """Put a peer called `fake` into `folder`; it has `fault` from its `from_turn`th turn on."""
    folder.mkdir(exist_ok=True)
    script = PEER.replace("FROM_TURN", str(from_turn)).replace("FAULT", FAULTS[fault])
    (folder / "loop.py").write_text(textwrap.dedent(script))
    (folder / "fake.py").write_text("")
    return folder


PYTHON = Path(sys.executable)
