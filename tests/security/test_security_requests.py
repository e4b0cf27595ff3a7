"""No single request takes the server down, holds it up, or spends without bound."""

import json
import re
import re._constants as ops  # what the library's own parser names its nodes by
import re._parser as regex_parser

import pytest
from kit import FakeRunner, GatedRunner, Rig, ScriptedRunner, byte_tokenizer, error_of, wait_until
from live import LiveServer, http_post, read_until
from source_tree import PACKAGE

from tiercel.api.http.schema import ChatRequest, CompletionRequest
from tiercel.engine.client import EngineClient
from tiercel.text.tokenizer import Tokenizer

CHAT, COMPLETE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def submitted(monkeypatch):
    """Prompts that reached the engine."""
    done, submit = [], EngineClient.submit
    monkeypatch.setattr(EngineClient, "submit", lambda *a, **k: done.append(a) or submit(*a, **k))
    return done


def test_CVE_2026_34756_n_is_bounded_before_anything_is_copied(rig, submitted):
    for n in (129, 16_385, 10**6, 2**62):
        assert rig.refused(COMPLETE, {"prompt": "x", "n": n})["param"] == "n"
        assert rig.refused(CHAT, {"messages": HI, "n": n})["param"] == "n"
    assert not submitted


def test_CVE_2026_73559_prompts_and_their_answers_are_bounded_together(rig, submitted):
    assert rig.refused(COMPLETE, {"prompt": ["x"] * 1025})["param"] == "prompt"
    assert rig.refused(COMPLETE, {"prompt": [[1]] * 1025})["param"] == "prompt"
    assert rig.refused(COMPLETE, {"prompt": ["x"] * 1000, "n": 100})["param"] == "n"
    assert not submitted


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[1], []]])
def test_CVE_2024_8768_an_empty_prompt_is_refused(rig, prompt):
    rig.refused(COMPLETE, {"prompt": prompt})
    assert rig.ask("GET", "/health").status_code == 200


def test_CVE_2025_48956_headers_are_bounded(rig):
    assert rig.ask("GET", "/v1/models", headers={"x-a": "y" * 70_000}).status_code == 431
    assert rig.ask("GET", "/v1/models", headers={f"x-{i}": "" for i in range(300)}).status_code == 431


FORMS = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "something"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"pattern": "((((", "type": 5}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://localhost/"}}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(?<=a)b"}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"grammar": "root ::= ("}},
    {"structured_outputs": {"choice": []}},
)


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_CVE_2025_48943_a_form_that_is_none_is_refused_and_the_engine_lives(rig, form):
    rig.refused(CHAT, {"messages": HI} | form)
    assert rig.ask("GET", "/health").status_code == 200
    assert rig.chat()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("regex", ["((a{1000}){1000}){1000}", "(" * 3000 + ")" * 3000, "a" * 10_000, "(x+x+)+y" * 2000])
def test_CVE_2026_55574_a_regex_without_end_is_refused(rig, regex):
    rig.refused(CHAT, {"messages": HI, "structured_outputs": {"regex": regex}})


def test_CVE_2025_29770_grammars_are_kept_up_to_a_number_of_bytes():
    from tiercel.protocol.structured import StructuredOutputsParams
    from tiercel.sampling.grammar_limits import GrammarLimits
    from tiercel.sampling.grammars import Grammars

    grammars = Grammars(byte_tokenizer(), 264, [256], GrammarLimits(cache_bytes=1 << 17))
    try:
        for i in range(12):
            grammars.compile(StructuredOutputsParams(choice=[f"choice {i}"] * (1 + i)))
            grammars.check()
        assert 1 < len(grammars._kept) < 12
    finally:
        grammars.close()


class FailsOnce(FakeRunner):
    """Gives, for prompts that begin with "!", a token that is none."""

    def _run(self, plan):
        result = super()._run(plan)
        for r in range(len(result.row_seq)):
            slot = int(plan.seq_slot[int(result.row_seq[r])])
            if self._row(slot).tokens[0] == ord("!"):
                result.row_token[r] = 10_000
        return result


def test_CVE_2026_54234_a_token_that_is_none_ends_its_request_alone(make_rig):
    rig = make_rig(runner=FailsOnce)
    whole = rig.complete()["choices"][0]["text"]
    for extra in ({}, {"logprobs": 2}):
        error = rig.refused(COMPLETE, {"prompt": "!x", "max_tokens": 5} | extra, 500)
        assert error["type"] == "InternalServerError"
        assert rig.complete()["choices"][0]["text"] == whole
    rig.assert_idle()


def test_CVE_2026_105757_an_exception_ends_only_the_request_it_is_of(make_rig, monkeypatch):
    rig = make_rig(runner=lambda limits: ScriptedRunner(limits, script=list(b"hello there")))
    live = rig.client.submit("other", None)
    decode = Tokenizer.token_bytes
    spoilt = []

    def fails(self, token_id):
        if spoilt and token_id == ord("o"):
            raise KeyError("a bug")
        return decode(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", fails)
    assert list(live)
    spoilt.append(True)
    assert rig.refused(COMPLETE, {"prompt": "x", "max_tokens": 8}, 500)["type"] == "InternalServerError"
    assert error_of(rig.stream(COMPLETE, prompt="x", max_tokens=8)[-1], 500)
    spoilt.clear()
    assert rig.complete()["usage"]["completion_tokens"] == 8
    assert rig.ask("GET", "/health").status_code == 200
    rig.assert_idle()


def repeats(parsed, inside=False):
    """Whether an unbounded repeat has another in it whose texts may be cut in several ways."""
    for kind, value in parsed:
        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            _, most, inner = value
            is_open = most == ops.MAXREPEAT
            if inside and is_open:
                return True
            if repeats(inner, inside or is_open):
                return True
        elif kind is ops.SUBPATTERN:
            if repeats(value[3], inside):
                return True
        elif kind is ops.BRANCH:
            if any(repeats(one, inside) for one in value[1]):
                return True
        elif kind in (ops.ASSERT, ops.ASSERT_NOT) and repeats(value[1], inside):
            return True
    return False


# Patterns with a repeat in a repeat that are linear all the same: the outer one begins with what the inner cannot hold.
SEPARATED = {
    r"(/[\w.~\-]+)*",
    r"(?<![\w./])(?:[A-Za-z]:)?[/\\][\w.\-+@]+(?:[/\\][\w.\-+@]+)+",
    r"(?:[A-Za-z]:)?[/\\][\w.\-]+(?:[/\\][\w.\-]+)+",
}


def test_CVE_2025_71379_no_pattern_over_a_models_or_clients_text_backtracks():
    assert repeats(regex_parser.parse("(a+)+"))
    found = set()
    for path in [*(PACKAGE / "api").rglob("*.py"), *(PACKAGE / "text" / "parsers").rglob("*.py")]:
        for pattern in re.findall(r're\.compile\(\s*r?"((?:[^"\\]|\\.)+)"', path.read_text()):
            if repeats(regex_parser.parse(pattern)):
                found.add(pattern)
    assert found <= SEPARATED


DENIED = ("tokenize", "chat_template", "messages", "tools", "return_dict", "return_tensors", "add_special_tokens", "_x")


@pytest.mark.parametrize("name", DENIED)
def test_CVE_2025_61620_words_that_steer_the_renderer_are_denied(rig, submitted, name):
    kwargs = {"chat_template_kwargs": {name: True}}
    assert rig.refused(CHAT, {"messages": HI} | kwargs)["param"] == "chat_template_kwargs"
    rig.refused("/tokenize", {"messages": HI} | kwargs)
    rig.post(MESSAGES, {"messages": HI, "max_tokens": 2} | kwargs, 400)
    rig.post(COUNT, {"messages": HI} | kwargs, 400)
    assert not submitted


def test_CVE_2026_115911_a_requests_template_is_run_on_no_route(rig, submitted):
    template = {"chat_template": "{{ messages }}"}
    for path, body in (
        (CHAT, {"messages": HI}),
        (COMPLETE, {"prompt": "x"}),
        ("/tokenize", {"messages": HI}),
        ("/v1/embeddings", {"messages": HI}),
        ("/pooling", {"messages": HI}),
        ("/score", {"queries": "a", "documents": "b"}),
    ):
        assert rig.refused(path, body | template)["param"] == "chat_template"
    rig.post(MESSAGES, {"messages": HI, "max_tokens": 2} | template, 400)
    rig.post(COUNT, {"messages": HI} | template, 400)
    assert not submitted


@pytest.mark.parametrize("value", ["AAAA", ["AAAA"], {"dtype": "float16"}])
def test_CVE_2025_62164_tensors_of_a_request_are_read_nowhere(rig, value):
    for path, body in ((COMPLETE, {"prompt": "x"}), (COMPLETE, {}), (CHAT, {"messages": HI})):
        assert rig.refused(path, body | {"prompt_embeds": value})["param"] == "prompt_embeds"


@pytest.mark.parametrize("name", ["logits_processors", "custom_logit_processor", "logit_processor"])
def test_CVE_2026_7304_no_function_comes_with_a_request(rig, name):
    assert rig.refused(COMPLETE, {"prompt": "x", name: "gASVAAAA"})["param"] == name
    assert rig.refused(CHAT, {"messages": HI, name: ["os.system"]})["param"] == name


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser", "parser", "tool_parser_plugin", "peg"])
def test_CVE_2026_107183_no_parser_comes_with_a_request(rig, name):
    assert rig.refused(CHAT, {"messages": HI, name: "hermes"})["param"] == name


def test_CVE_2026_114051_min_tokens_are_held_against_what_max_tokens_become(rig):
    for fields in ({"max_tokens": 3, "min_tokens": 4}, {"min_tokens": 300}, {"min_tokens": 2**62}):
        assert rig.refused(CHAT, {"messages": HI} | fields)["param"] == "min_tokens"
        assert rig.refused(COMPLETE, {"prompt": "x"} | fields)["param"] == "min_tokens"
    assert rig.ask("GET", "/health").status_code == 200


def test_PYSEC_2026_4000_ids_are_held_against_the_logits_and_not_the_tokenizer(rig):
    n_logits, n_tokens = rig.facade.vocab_size, rig.tokenizer.vocab_size
    assert n_tokens < n_logits
    for token_id, status in ((n_tokens, 200), (n_logits - 1, 200), (n_logits, 400), (2**31, 400)):
        for field in ({"logit_bias": {str(token_id): 1}}, {"stop_token_ids": [token_id]}):
            rig.post(COMPLETE, {"prompt": "x", "max_tokens": 1} | field, status)


def test_CVE_2026_114052_what_is_kept_of_prompts_has_a_bound(rig):
    """Keys of a request's own choosing make no entry anywhere: pages are the pool's, and it has so many."""
    for i in range(50):
        rig.complete(prompt=f"prompt {i}", cache_salt=f"salt {i}")
        rig.chat(chat_template_kwargs={f"name{i}": i})
    assert rig.core.snapshot.n_pages_cached <= rig.core.limits.n_pages
    rig.core.check()


@pytest.mark.parametrize("name", ["media_io_kwargs", "mm_processor_kwargs"])
def test_CVE_2026_105758_no_request_raises_what_the_server_reads(rig, name):
    assert rig.refused(CHAT, {"messages": HI, name: {"video": {"fps": 1e9, "backend": "x"}}})["param"] == name


@pytest.mark.parametrize("is_stream", [True, False])
def test_CVE_2026_9540_a_client_that_leaves_gives_everything_back(is_stream):
    rig = Rig(runner=GatedRunner, settings={"port": 0, "shutdown_s": 0.0}, async_scheduling=False)
    live = LiveServer(rig)
    try:
        body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": is_stream, "ignore_eos": True, "n": 3}).encode()
        with live.connection() as raw:
            raw.sendall(http_post(COMPLETE, body))
            rig.runner.let(3)
            wait_until(lambda: rig.core.snapshot.n_total_generation_tokens >= 3)
            if is_stream:
                read_until(raw, b"data: ")
        rig.runner.open()
        rig.assert_idle()
    finally:
        live.close()
        rig.close()


INTS = sorted(
    name
    for name, kind in {
        **ChatRequest.__annotations__,
        **CompletionRequest.__annotations__,
        **CompletionRequest.__base__.__annotations__,
    }.items()
    if "int" in str(kind) and "list" not in str(kind)
)


@pytest.mark.parametrize("name", INTS)
def test_CVE_2026_21869_no_whole_number_is_too_small_or_too_large_for_us(rig, name):
    for value in (-1, -2, -(2**31), -(2**63), -(2**63) - 1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 10**400):
        for path, base in ((COMPLETE, {"prompt": "x"}), (CHAT, {"messages": HI})):
            body = json.dumps({"max_tokens": 1} | base | {name: value}).encode()
            response = rig.ask("POST", path, content=body, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400), (value, response.text)
            if response.status_code == 400:
                error_of(response.json(), 400)


@pytest.mark.parametrize("path", ["/tokenize", COUNT, MESSAGES, COMPLETE, CHAT])
def test_PR_51447_what_only_counts_is_bounded_too(rig, path):
    text = "x" * ((4 << 20) + 1)
    body = {"prompt": text} if path in ("/tokenize", COMPLETE) else {"messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": 1} if path == MESSAGES else {}
    body |= {"truncate_prompt_tokens": 1} if path in (COMPLETE, CHAT) else {}
    rig.post(path, body, 400)
    rig.post(MESSAGES, {"messages": HI, "max_tokens": 1, "stop_sequences": ["x"] * 17}, 400)
    rig.post(MESSAGES, {"messages": HI, "max_tokens": 1, "stop_sequences": ["x" * 1025]}, 400)
    rig.post("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}, 400)


def test_GO_2025_3548_packed_bodies_are_not_unpacked(rig):
    import gzip

    packed = gzip.compress(b'{"prompt": "' + b"x" * 1_000_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = rig.ask("POST", COMPLETE, content=packed, headers=headers)
    error_of(response.json(), 400)
