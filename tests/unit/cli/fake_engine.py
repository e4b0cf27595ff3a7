"""An engine without a model: it echoes, and notes what it was asked. Stands where `tiercel.llm.llm.LLM` does."""

import threading

from tiercel.base.errors import PromptTooLong


class FakeEngine:
    def __init__(self, model="", *, has_chat_template=True, **options):
        self.model = model
        self.options = options
        self.has_chat_template = has_chat_template
        self.asked = []
        self.params = []
        self.n_aborted = 0
        self.is_closed = False

    def stream_chat(self, messages, params):
        self.asked.append([dict(message) for message in messages])
        self.params.append(params)
        return self._answer(messages[-1]["content"])

    def stream(self, prompt, params):
        self.asked.append(prompt)
        self.params.append(params)
        return self._answer(prompt)

    def _answer(self, text):
        try:
            if text == "long":
                raise PromptTooLong("prompt: got 99 tokens; need at most 9")
            if text == "endless":
                while True:
                    yield "on and "
                    threading.Event().wait(0.002)
            yield "You said: "
            yield text
        except GeneratorExit:
            self.n_aborted += 1
            raise

    def stats(self):
        return {"generated_tokens": 7, "rate_tok_s": 12.3456}

    def close(self):
        self.is_closed = True
