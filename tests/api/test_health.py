"""/health tells of every thread, without waiting for any; and the other routes about the server itself."""

import threading

from kit import DEADLINE_S, GatedRunner, byte_tokenizer, wait_until

from tiercel.api.http.probe import Probe


class Thread:
    """Takes work, and does it when told."""

    def __init__(self):
        self.now_s = 0.0
        self.work = []

    def probe(self, stall_s):
        return Probe(self.work.append, stall_s, clock=lambda: self.now_s)

    def run(self):
        while self.work:
            self.work.pop()()


def test_a_thread_is_asked_once_until_it_answers():
    thread = Thread()
    probe = thread.probe(10)
    assert all(probe.is_answering() for _ in range(3))
    assert len(thread.work) == 1
    thread.now_s = 10
    assert probe.is_answering()
    thread.now_s = 10.5
    assert not probe.is_answering()
    thread.run()
    assert probe.is_answering()
    assert len(thread.work) == 1


def test_a_thread_that_answers_is_alive_however_long_nobody_asked():
    thread = Thread()
    probe = thread.probe(10)
    for now_s in (0, 100, 10_000):
        thread.now_s = now_s
        assert probe.is_answering()
        thread.run()


def test_an_idle_server_is_healthy_and_says_nothing(rig):
    for _ in range(3):
        response = rig.ask("GET", "/health")
        assert (response.status_code, response.content) == (200, b"")
        assert rig.ask("POST", "/ping").status_code == 200


def test_a_thread_that_is_stuck_makes_the_server_unhealthy(make_rig):
    rig = make_rig(settings={"thread_stall_s": 0.0})
    let_go = threading.Event()
    rig.core.call_soon(lambda: let_go.wait(DEADLINE_S))
    try:
        rig.ask("GET", "/health")
        wait_until(lambda: rig.ask("GET", "/health").status_code == 503)
        answer = rig.ask("GET", "/health").json()
        assert answer["status"] == "dead"
        assert "engine" in answer["threads"]
        assert rig.ask("GET", "/ping").status_code == 503
    finally:
        let_go.set()
    wait_until(lambda: rig.ask("GET", "/health").status_code == 200)


def test_a_step_that_takes_long_is_no_death(make_rig):
    rig = make_rig(runner=GatedRunner)
    handle = rig.client.submit({"prompt_token_ids": [1, 2, 3]})
    for _ in range(3):
        assert rig.ask("GET", "/health").status_code == 200
    rig.runner.open()
    handle.close()


def test_an_engine_whose_thread_is_gone_is_dead(make_rig):
    def fails():
        raise SystemExit

    rig = make_rig()
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        rig.core.call_soon(fails)
        wait_until(lambda: rig.ask("GET", "/health").status_code == 503)
    finally:
        threading.excepthook = hook
    assert rig.ask("GET", "/ready").json() == {"status": "dead"}


def test_load_counts_what_is_under_way(rig):
    assert rig.ask("GET", "/load").json() == {"server_load": 0}
    rig.service.n_open += 2
    try:
        assert rig.ask("GET", "/load").json() == {"server_load": 2}
    finally:
        rig.service.n_open -= 2


def test_the_tokenizer_is_described_only_when_told_to(make_rig):
    assert "--enable-tokenizer-info-endpoint" in make_rig().ask("GET", "/tokenizer_info").json()["error"]["message"]
    rig = make_rig(settings={"has_tokenizer_info": True})
    info = rig.ask("GET", "/tokenizer_info").json()
    tokenizer = byte_tokenizer()
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|endoftext|>")
    assert info["chat_template"] == tokenizer.chat_template
    assert info["vocab_size"] == tokenizer.vocab_size
    assert {one["content"] for one in info["added_tokens_decoder"].values()} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }
