"""A process in which grammars are compiled before the engine's own process does: it may be killed, the engine may not.

Spoken to over its standard streams, in frames of four bytes' length and msgpack: first one `WorkerStart`, then an
answer for each `CompileJob`. Its address space is bounded from the start, its processor time for each job; what
exceeds either
ends the process, which the other side understands. Imports little, so that it starts fast.
"""

import resource
import sys
from typing import Any, BinaryIO

import msgspec

from tiercel.sampling.llguidance_forms import LIBRARY_QUIET, make_tokenizer, parser_limits, to_grammar


class WorkerStart(msgspec.Struct):
    """What a worker must know of the model and its limits. `tokens`: the bytes of each id."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    worker_bytes: int
    n_lexer_states_max: int


class CompileJob(msgspec.Struct):
    """One grammar to compile, in the words of `llguidance_forms.to_grammar`, and the processor time it may take."""

    form: str
    text: str
    options: dict[str, Any]
    cpu_s: int


class CompileAnswer(msgspec.Struct):
    """The library's grammar and the bytes it took to compile, or why it cannot be compiled."""

    grammar: str = ""
    n_bytes: int = 0
    error: str = ""


def write_frame(to: BinaryIO, message: msgspec.Struct) -> None:
    """Send one message."""
    data = msgspec.msgpack.encode(message)
    to.write(len(data).to_bytes(4, "little") + data)
    to.flush()


def _read_frame(source: BinaryIO) -> bytes | None:
    size = source.read(4)
    return source.read(int.from_bytes(size, "little")) if len(size) == 4 else None


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  a bound on imports: pathlib takes milliseconds
        return int(file.read().split()[1]) * resource.getpagesize()


def _compile(job: CompileJob, tokenizer: Any, n_states_max: int) -> CompileAnswer:
    from llguidance import LLMatcher

    used = resource.getrusage(resource.RUSAGE_SELF)
    # Whole seconds are what the system counts in; the next job moves the limit on.
    until_s = int(used.ru_utime + used.ru_stime) + 1 + job.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.RLIM_INFINITY))
    before = _resident_bytes()
    try:
        grammar = to_grammar(job.form, job.text, job.options)
    except (ValueError, RecursionError) as error:
        return CompileAnswer(error=str(error) or "it is nested too deeply")
    matcher = LLMatcher(tokenizer, grammar, log_level=LIBRARY_QUIET, limits=parser_limits(n_states_max))
    _begin(matcher)
    if matcher.is_error():
        return CompileAnswer(error=matcher.get_error())
    return CompileAnswer(grammar=grammar, n_bytes=max(_resident_bytes() - before, 0))


def _begin(matcher: Any) -> None:
    """Go a token into the form: what is too large to be followed often shows only there."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    first = next((8 * k + (byte & -byte).bit_length() - 1 for k, byte in enumerate(mask) if byte), None)
    if first is None or matcher.is_error():
        return
    matcher.consume_token(first)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()


def main() -> None:
    """Serve until the other side closes the stream."""
    source, to = sys.stdin.buffer, sys.stdout.buffer
    first = _read_frame(source)
    if first is None:
        return
    start = msgspec.msgpack.decode(first, type=WorkerStart)
    resource.setrlimit(resource.RLIMIT_AS, (start.worker_bytes, start.worker_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = make_tokenizer(start.tokens, start.special_ids, start.eos_ids)
    while (data := _read_frame(source)) is not None:
        job = msgspec.msgpack.decode(data, type=CompileJob)
        write_frame(to, _compile(job, tokenizer, start.n_lexer_states_max))


if __name__ == "__main__":
    main()
