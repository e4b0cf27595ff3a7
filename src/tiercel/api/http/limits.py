"""What one request may hold: the limits that are checked before any work is spent on it. Knows no request.

Each field is a row of the table of options, as those of `settings`, which inherits them.
"""

from dataclasses import dataclass

from tiercel.base.options import option
from tiercel.base.units import parse_bytes, parse_int_human
from tiercel.protocol.params import N_BAD_WORDS_MAX, N_LOGIT_BIAS_MAX, N_STOP_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a request. Beyond one it is refused with 400, and the field at fault."""

    n_outputs_max: int = option(
        128,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        env=(("VLLM_MAX_N_SEQUENCES", parse_int_human),),
        help="the most answers (`n`) of a request",
        why="OpenAI's",
    )
    n_prompts_max: int = option(
        1024,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        env=(("VLLM_MAX_COMPLETION_PROMPTS", parse_int_human),),
        help="the most prompts of a completion request",
        why="vLLM's",
    )
    json_depth_max: int = option(
        64,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="how deep lists and objects of a body may be in each other",
        why="no request needs more, and whoever reads one recurses",
    )
    n_messages_max: int = option(
        10_000,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="the most messages of a chat",
        why="more than any context holds",
    )
    n_parts_max: int = option(
        1_000,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="the most parts of a message",
        why="more than any context holds",
    )
    n_stop_max: int = option(
        N_STOP_MAX,
        parse=parse_int_human,
        least=0,
        most=N_STOP_MAX,
        metavar="N",
        group="limits",
        help="the most stop strings of a request",
        why="each is looked for in each answer",
    )
    n_bad_words_max: int = option(
        N_BAD_WORDS_MAX,
        parse=parse_int_human,
        least=0,
        most=N_BAD_WORDS_MAX,
        metavar="N",
        group="limits",
        help="the most bad words of a request",
        why="each is looked for at each token",
    )
    n_logit_bias_max: int = option(
        N_LOGIT_BIAS_MAX,
        parse=parse_int_human,
        least=0,
        most=N_LOGIT_BIAS_MAX,
        metavar="N",
        group="limits",
        help="the most tokens whose logits a request biases",
        why="what the sampler takes",
    )
    n_prompt_logprobs_max: int = option(
        1 << 20,
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="limits",
        help="the most log-probabilities of a request's prompts, all positions together",
        why="some 200 MB of them",
    )
    tokenize_chars_max: int = option(
        4 << 20,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="the most characters that are cut of a text that need not fit, as in /tokenize",
        why="longer than any context; about a second of one core",
    )
    n_detokenize_max: int = option(
        1 << 20,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="the most tokens of /detokenize",
        why="longer than any context",
    )
    n_tools_max: int = option(
        128,
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="limits",
        help="the most tools of a request",
        why="OpenAI's; all go through the template",
    )
    tools_bytes_max: int = option(
        1 << 20,
        parse=parse_bytes,
        least=0,
        metavar="SIZE",
        group="limits",
        help="the most bytes of a request's tools",
        why="more than any context holds",
    )
