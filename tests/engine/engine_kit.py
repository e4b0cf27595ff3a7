"""What the engine's tests share: a core on a fake runner, stepped by hand, that keeps what it is told."""

from tiercel.engine.client import EngineClient
from tiercel.engine.config import EngineConfig
from tiercel.engine.core import EngineCore
from tiercel.engine.request import NewSequence
from tiercel.kv.page_keys import PageKeys, root_key
from tiercel.protocol.params import SamplingParams
from tiercel.testing.clock import VirtualClock
from tiercel.testing.fake_runner import FakeRunner, make_limits


class Bench:
    """A core without a thread."""

    def __init__(
        self, *, limits=None, runner=None, eos_ids=(), listener=None, make_tiers=None, speculation=None, **config
    ):
        self.runner = runner or FakeRunner(limits or make_limits())
        config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "check_each_step": True} | config
        self.clock = VirtualClock()
        self.core = EngineCore(
            self.runner,
            EngineConfig(**config),
            sink=self._keep,
            clock=self.clock,
            listener=listener,
            make_tiers=make_tiers,
            speculation=speculation,
        )
        self.eos_ids = frozenset(eos_ids)
        self.tokens = {}
        self.finals = {}
        self.firsts = {}
        self.n_rounds = 0

    @property
    def scheduler(self):
        return self.core._scheduler

    def _keep(self, updates):
        for update in updates:
            assert update.sequence_id not in self.finals, f"{update.sequence_id} goes on after its end"
            self.tokens.setdefault(update.sequence_id, []).extend(update.token_ids)
            if update.token_ids:
                self.firsts.setdefault(update.sequence_id, update)
            if update.finish_reason is not None or update.error is not None:
                self.finals[update.sequence_id] = update

    def add(self, name, prompt, *, max_tokens=4, priority=0, salt=None, seed=7, constraint=None, **params):
        limits = self.runner.limits
        params = SamplingParams(max_tokens=max_tokens, **params)
        size = limits.page_size_tokens
        new = NewSequence(
            sequence_id=name,
            prompt_token_ids=list(prompt),
            params=params,
            seed=seed,
            max_total_tokens=min(len(prompt) + max_tokens, limits.max_len_tokens),
            eos_ids=self.eos_ids,
            page_keys=PageKeys(root_key("w", "f16", size, salt=salt), size),
            is_private=salt is not None,
            arrival_s=self.clock(),
            priority=priority,
            constraint=constraint,
        )
        self.core.add([new])
        return new

    def step(self):
        self.clock.advance(0.01)
        self.n_rounds += 1
        return self.core.step_once()

    def run(self, n_max=2000):
        for _ in range(n_max):
            if not self.step() and self.core._commands.empty():
                return self
        raise AssertionError("the engine does not come to an end")

    def assert_idle(self):
        """Every page and slot is back."""
        scheduler = self.scheduler
        scheduler.check()
        scheduler.check_idle()
        assert not self.core._sequences
        assert self.core._n_waiting == 0
        assert len(scheduler._free_slots) == self.runner.limits.n_slots


class LetterTokenizer:
    """97 tokens: the printable ASCII letters, then the two bytes of an e with an acute accent."""

    vocab_size = 97
    max_chars_per_token = 1
    byte_decoding = None
    special_ids = frozenset()

    def __init__(self, eos_ids=()):
        self.eos_ids = tuple(eos_ids)

    def token_bytes(self, token_id):
        return bytes([32 + token_id]) if token_id < 95 else [b"\xc3", b"\xa9"][token_id - 95]

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) - 32 for letter in text]

    def encode_many(self, texts, *, add_special_tokens=True):
        return [self.encode(text) for text in texts]


def make_client(*, limits=None, runner=None, tokenizer=True, eos_ids=(), starts=True, **config):
    """Give a client of an engine on a thread of its own."""
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "check_each_step": True} | config
    runner = runner or FakeRunner(limits or make_limits())
    core = EngineCore(runner, EngineConfig(**config))
    tokenizer = LetterTokenizer(eos_ids) if tokenizer is True else tokenizer
    client = EngineClient(core, tokenizer, weights_digest="w", kv_dtype="f16")
    if starts:
        core.start()
    return client
