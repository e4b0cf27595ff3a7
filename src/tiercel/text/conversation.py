"""Conversations as prompts: which template a model has, and the token ids of a rendered one. Knows no engine."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tiercel.base.errors import RequestError, TiercelError
from tiercel.text.chat_template import ChatTemplate, default_template
from tiercel.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class Conversations:
    """Renders conversations for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(maxsize=8)(self._compile)

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template."""
        return (
            self._tokenizer is not None
            and default_template(self._tokenizer.chat_templates, has_tools=False) is not None
        )

    def warm(self) -> None:
        """Compile the model's own template now rather than at the first conversation; a broken one is told then."""
        if self._tokenizer is not None and self.has_template:
            source = default_template(self._tokenizer.chat_templates, has_tools=False)
            with contextlib.suppress(TiercelError):
                self._compiled(source)

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the conversation as `{"prompt": text, "prompt_token_ids": ids}`.

        Raises: RequestError: there is no template, it refuses the messages, or a message is none.
        """
        if self._tokenizer is None:
            raise RequestError("messages: this engine has no tokenizer; send prompt_token_ids", param="messages")
        source = chat_template or default_template(self._tokenizer.chat_templates, has_tools=bool(tools))
        if source is None:
            raise RequestError(
                "messages: this model has no chat template; send a prompt, or give a template with chat_template",
                param="messages",
            )
        _check(messages)
        text = self._compiled(source).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )
        # The template writes the special tokens itself: adding them again would double the first.
        return {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}

    def _compile(self, source: str) -> ChatTemplate:
        assert self._tokenizer is not None
        bos, eos = self._tokenizer.bos_id, next(iter(self._tokenizer.eos_ids), None)
        return ChatTemplate(
            source,
            bos_token=None if bos is None else self._tokenizer.token_text(bos),
            eos_token=None if eos is None else self._tokenizer.token_text(eos),
        )


def _check(messages: Sequence[Message]) -> None:
    """Refuse what a template would print as it is, or as nothing, into the prompt."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refused(f"messages[{i}]", message, "an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise _refused(f"messages[{i}].role", role, "a role, as in user,")
        if content is None and role != "assistant" and not message.get("tool_calls"):
            raise _refused(f"messages[{i}].content", content, "text")
        if content is not None and not isinstance(content, str | list | tuple):
            raise _refused(f"messages[{i}].content", content, "text, or a list of parts,")


def _refused(where: str, got: object, needed: str) -> RequestError:
    shown = "nothing" if got is None else "an empty text" if got == "" else type(got).__name__
    return RequestError(f"{where}: got {shown}; {needed} is needed", param=where)
