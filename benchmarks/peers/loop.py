"""Runs a peer's engine for `tiercel bench`, inside the peer's own virtual environment. Standard library only.

    PYTHON loop.py NAME                                  speak lines of JSON (see `tiercel.bench.peers`)
    PYTHON loop.py NAME --once MODEL PROMPT N_THREADS    write the first token of the answer as text, and end
    PYTHON loop.py NAME --about                          write the versions that matter as JSON, and end

NAME.py beside this file defines `PACKAGES`, the distributions whose versions matter, and `Engine`:

    Engine(model, n_threads, max_len_tokens, max_num_seqs)
    .config                                  what decides its speed, for the row
    .generate(requests) -> (token_ids, first_token_s or None)   greedily, each to its whole length, past any end token
    .first_text(prompt) -> str               the first token of the answer

Its packages are imported inside `Engine`, so that a missing one is told and not a traceback.
"""
# ruff: noqa: D103 (loop.py says what each part is)

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent


def load_peer(name):
    # A script may have its package's name (llama_cpp.py): this folder must not be where packages are looked for.
    sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != HERE]
    spec = importlib.util.spec_from_file_location(f"peer_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def versions(peer):
    told = {"python": platform.python_version()}
    for package in peer.PACKAGES:
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return told


def keep_stdout():
    """Give a stream to the real standard output, and send whatever a library prints to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


def answer(peer, engine, asked):
    if asked["do"] == "load":
        engine = peer.Engine(asked["model"], asked["n_threads"], asked["max_len_tokens"], asked["max_num_seqs"])
        return engine, {"versions": versions(peer), "config": engine.config}
    if asked["do"] == "generate" and engine is not None:
        requests = [(list(one["token_ids"]), one["max_tokens"]) for one in asked["requests"]]
        start_s = time.perf_counter()
        token_ids, first_token_s = engine.generate(requests)
        elapsed_s = time.perf_counter() - start_s
        token_ids = [[int(token) for token in ids] for ids in token_ids]
        return engine, {"token_ids": token_ids, "elapsed_s": elapsed_s, "first_token_s": first_token_s}
    return engine, {"error": f"got {asked['do']!r} out of order; load comes first, then generate"}


def serve(peer, out):
    engine = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if asked["do"] == "end":
                return
            engine, told = answer(peer, engine, asked)
        except ImportError as error:
            told = {"error": str(error), "kind": "missing"}
        except Exception as error:  # noqa: BLE001 a process's boundary: answered, and the next request may go well
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(told) + "\n")
        out.flush()


def main(name, *words):
    out = keep_stdout()
    peer = load_peer(name)
    if words[:1] == ("--about",):
        found = versions(peer)
        is_there = any(package in found for package in peer.PACKAGES)
        told = (
            {"versions": found}
            if is_there
            else {"error": f"no {peer.PACKAGES[0]} in its environment", "kind": "missing"}
        )
        out.write(json.dumps(told) + "\n")
    elif words[:1] == ("--once",):
        model, prompt, n_threads = words[1:]
        engine = peer.Engine(model, int(n_threads), 512, 1)
        out.write(engine.first_text(prompt))
        out.flush()
    else:
        serve(peer, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
