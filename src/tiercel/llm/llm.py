"""`LLM`: generate and chat in one call, with vLLM's argument and output names. Owns one engine; `close` ends it."""

import contextlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError, RequestError, TiercelError
from tiercel.boot.engine import Engine, build_engine, log_plan
from tiercel.protocol.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from tiercel.protocol.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    # `boot` imports the engine while weights are packed; here it would come before.
    from tiercel.engine.prompts import Prompt
    from tiercel.llm.pooling import Params as PoolingChoice
    from tiercel.llm.pooling import Task
    from tiercel.protocol.outputs import RequestOutput
    from tiercel.protocol.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from tiercel.text.conversation import Message
    from tiercel.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process.

    `model` is a folder, a .gguf file, a catalogue name or `org/name`; None takes the catalogue's default. Further
    options are those of `tiercel.base.config.EngineOptions`, under vLLM's names (`docs/options.md` lists them); one
    that is unknown, or gone from vLLM, is refused with the nearest known name or what to do instead.

    Raises: ModelNotFound, ModelFileError, UnsupportedModel, ConfigError, OutOfPages: the message says what to do.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._engine = build_engine(engine_options(model=model, **options), on_plan=log_plan)
        # An object that is dropped, or a program that ends, without `close`: its threads would outlive what they use.
        weakref.finalize(self, self._engine.close)
        self._conversations = self._engine.conversations
        self.client = self._engine.client

    @property
    def engine(self) -> Engine:
        """The engine beneath, for benchmarks and tests."""
        return self._engine

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self._conversations.has_template

    def get_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer.

        Raises: ConfigError: the engine was started without one, or the checkpoint has none.
        """
        if self._engine.tokenizer is None:
            raise ConfigError(
                "tokenizer: this engine has none; leave out skip_tokenizer_init, or name one with tokenizer="
            )
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a call without sampling parameters uses: vLLM's defaults with the model's own over them."""
        from tiercel.sampling.defaults import default_params

        return default_params(self._engine.plan.generation_defaults)

    def generate(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> "list[RequestOutput]":
        """Complete prompts; the outputs come in the order of the prompts.

        A prompt is text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. `sampling_params` is one
        for all or one for each.

        Raises:
            RequestError: a request is refused, before any is run; the message names its index.
            RequestFailed: a request could not be finished; the others were.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "list[RequestOutput]":
        """Answer one conversation or several, each a list of `{"role": …, "content": …}`.

        Raises: as `generate`; RequestError also when there is no template or it refuses the messages.
        """
        prompts = [
            self._conversations.prompt(
                one,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for one in _as_conversations(messages)
        ]
        return self._run(prompts, sampling_params, use_tqdm=use_tqdm, priority=0)

    def beam_search(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Look for the likeliest sequences that go on from each prompt; the outputs come in the order of the prompts.

        `concurrency_limit` is how many prompts are searched for at once; None: all.

        Raises:
            RequestError: a prompt is refused, before any is run.
            RequestFailed: a step could not be finished.
        """
        from tiercel.engine.beams import outputs_of, prepare_beams, run_beams
        from tiercel.protocol.outputs import RequestOutput

        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: got {type(params).__name__}; BeamSearchParams is needed", param="params")
        if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
            raise RequestError(
                f"concurrency_limit: got {concurrency_limit!r}; a whole number, 1 or more, or None is needed",
                param="concurrency_limit",
            )
        asked = _as_list(prompts)
        prepared = [prepare_beams(self.client, prompt, params) for prompt in asked]
        outputs = [BeamSearchOutput() for _ in prepared]
        size = concurrency_limit or max(len(prepared), 1)

        def results() -> "Iterator[tuple[int, RequestOutput | TiercelError]]":
            for first in range(0, len(prepared), size):
                for i, beams in run_beams(self.client, prepared[first : first + size], params):
                    one = prepared[first + i]
                    found = outputs_of(beams, one.token_ids, params, self._engine.tokenizer)
                    before = one.text if one.text is not None else self._text_of(one.token_ids, params)
                    outputs[first + i].sequences = [
                        BeamSearchSequence(
                            orig_prompt=asked[first + i],
                            tokens=one.token_ids + out.token_ids,
                            logprobs=out.logprobs or [],
                            cum_logprob=out.cumulative_logprob or 0.0,
                            text=None if before is None else before + out.text,
                            finish_reason=out.finish_reason,
                        )
                        for out in found
                    ]
                    yield first + i, RequestOutput("", one.text, one.token_ids, None, found, finished=True)

        for _ in _with_progress(results(), len(prepared), is_shown=use_tqdm):
            pass
        return outputs

    def _text_of(self, token_ids: list[int], params: BeamSearchParams) -> str | None:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return None
        return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def stream(self, prompt: "Prompt", sampling_params: SamplingParams | None = None) -> Generator[str, None, None]:
        """Yield the text of one completion as it comes; closing the generator aborts it."""
        params = msgspec.structs.replace(
            sampling_params or self.get_default_sampling_params(), output_kind=RequestOutputKind.DELTA
        )
        if params.n != 1:
            raise RequestError(f"n: got {params.n}; a stream of text is one sequence; set n to 1", param="n")
        with self.client.submit(prompt, params) as handle:
            for output in handle:
                for part in output.outputs:
                    if part.text:
                        yield part.text

    def stream_chat(
        self, messages: "Sequence[Message]", sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Yield the answer to a conversation as it comes; closing the generator aborts it."""
        yield from self.stream(self._conversations.prompt(messages), sampling_params)

    def embed(
        self, prompts: "Prompt | Sequence[Prompt]", *, pooling_params: "PoolingChoice" = None
    ) -> "list[EmbeddingRequestOutput]":
        """Return a vector of each text; `outputs.embedding` is a list of floats.

        Raises: as `generate`; RequestError also when the model does not embed.
        """
        from tiercel.llm import pooling

        return [pooling.as_embedding(one) for one in self.encode(prompts, pooling_params, pooling_task="embed")]

    def classify(
        self, prompts: "Prompt | Sequence[Prompt]", *, pooling_params: "PoolingChoice" = None
    ) -> "list[ClassificationRequestOutput]":
        """Return a number for each label of each text; `outputs.probs` is a list of floats.

        Raises: as `generate`; RequestError also when the model has no labels.
        """
        from tiercel.llm import pooling

        return [pooling.as_classes(one) for one in self.encode(prompts, pooling_params, pooling_task="classify")]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, pooling_params: "PoolingChoice" = None
    ) -> "list[ScoringRequestOutput]":
        """Score the first text with each of the second, or as many with as many; `outputs.score` is a float.

        Raises: as `generate`; RequestError also when the model cannot score.
        """
        from tiercel.llm import pooling

        firsts, seconds = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        if not seconds or len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"data_1: got {len(firsts)} texts for {len(seconds)} of data_2; 1 or as many are needed", param="data_1"
            )
        return pooling.score(self.client, firsts * (len(seconds) // len(firsts)), seconds, pooling_params)

    def encode(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        pooling_params: "PoolingChoice" = None,
        *,
        pooling_task: "Task | None" = None,
    ) -> "list[PoolingRequestOutput[PoolingOutput]]":
        """Pool each text as the task says; `outputs.data` is float32 [W], or [T, W] for a task of tokens.

        Raises: as `generate`; RequestError also when the model does not do that.
        """
        from tiercel.llm import pooling

        return pooling.pool(self.client, [(one, None) for one in _as_list(prompts)], pooling_params, pooling_task)

    def reward(
        self, prompts: "Prompt | Sequence[Prompt]", *, pooling_params: "PoolingChoice" = None
    ) -> "list[PoolingRequestOutput[PoolingOutput]]":
        """Return a reward model's numbers of each token: `encode` with the task token_classify."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify")

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts so far."""
        counts = msgspec.structs.asdict(self.client.snapshot)
        tiers, drafts = counts.pop("tiers"), counts.pop("speculation")
        counts |= {} if drafts is None else msgspec.structs.asdict(drafts)
        return counts | {f"tier {one.label}": one.as_dict() for one in tiers}

    def reset_prefix_cache(self) -> bool:
        """Forget cached pages; False, and nothing is forgotten, while anything runs."""
        return self.client.reset_prefix_cache()

    def close(self) -> None:
        """End the engine and free what it holds. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, prompts: "Sequence[Prompt]", sampling_params: Params, *, use_tqdm: bool, priority: int | Sequence[int]
    ) -> "list[RequestOutput]":
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        _check_params(params, len(prompts))
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        failure: TiercelError | None = None
        results = self.client.generate_many(prompts, params, priority=priority)
        for i, result in _with_progress(results, len(prompts), is_shown=use_tqdm):
            if isinstance(result, TiercelError):
                failure = failure or result
            else:
                outputs[i] = result
        if failure is not None:
            raise failure
        return [output for output in outputs if output is not None]


def _check_params(given: SamplingParams | Sequence[SamplingParams], n_prompts: int) -> None:
    if isinstance(given, SamplingParams):
        return
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        raise RequestError(
            f"sampling_params: got {type(given).__name__}; SamplingParams is needed, or a list of them, one a prompt",
            param="sampling_params",
        )
    if len(given) != n_prompts:
        raise RequestError(
            f"sampling_params: got {len(given)} for {n_prompts} prompts; one for all, or one each, is needed",
            param="sampling_params",
        )


def _as_list(prompts: "Prompt | Sequence[Prompt]") -> "Sequence[Prompt]":
    """Tell one prompt from several: text, a dict and a list of ids are one."""
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        return [cast("Prompt", prompts)]
    if len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence) and not hasattr(prompts[0], "__len__"):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _as_conversations(messages: "Sequence[Message] | Sequence[Sequence[Message]]") -> "Sequence[Sequence[Message]]":
    """Tell one conversation from several: an empty one, or one that begins with a message, is one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages: got {type(messages).__name__}; a list of messages, or of such lists, is needed",
            param="messages",
        )
    is_one = not messages or isinstance(messages[0], Mapping)
    many = [messages] if is_one else messages
    for i, one in enumerate(many):
        if isinstance(one, str | bytes | Mapping) or not isinstance(one, Sequence):
            raise RequestError(
                f"messages[{i}]: got {type(one).__name__}; a list of messages is needed", param="messages"
            )
    return cast("Sequence[Sequence[Message]]", many)


def _with_progress(
    results: "Iterator[tuple[int, RequestOutput | TiercelError]]", n: int, *, is_shown: bool
) -> "Iterator[tuple[int, RequestOutput | TiercelError]]":
    if not is_shown:
        yield from results
        return
    from tqdm import tqdm

    from tiercel.protocol.outputs import RequestOutput

    n_in = n_out = 0
    with contextlib.closing(tqdm(total=n, desc="Processed prompts", dynamic_ncols=True)) as bar:
        for i, result in results:
            if isinstance(result, RequestOutput):
                n_in += len(result.prompt_token_ids)
                n_out += sum(len(o.token_ids) for o in result.outputs)
                elapsed_s = max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(
                    f"input: {n_in / elapsed_s:.1f} tok/s, output: {n_out / elapsed_s:.1f} tok/s", refresh=False
                )
            bar.update(1)
            yield i, result
