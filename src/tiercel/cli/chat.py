"""The interactive chat: reads messages and commands from a terminal, keeps the conversation, shows answers.

State: the conversation (`messages`, without the system message), the system message, and the sampling settings; all end
with the process, nothing is written to disk. Ctrl-C stops an answer (its text stays in the conversation) or clears the
line that is being typed; Ctrl-D or /exit ends the chat. A failed turn is taken back and the chat goes on.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tiercel.base.errors import ConfigError, EngineDead, PromptTooLong, RequestError, TiercelError
from tiercel.cli.answer import TextEngine, show_answer, show_stats
from tiercel.cli.options import SAMPLING_OPTIONS

_HELP = '''Type a message and press Enter. End a line with \\ to go on in the next one, or write a
text of several lines between """ and """.

  /set                       show how answers are sampled
  /set temperature 0.2       change it; `default` undoes it (also: {names})
  /system TEXT               set the system message; without TEXT, show it
  /clear                     forget the conversation
  /help                      show this
  /exit                      leave (also /bye, /quit and Ctrl-D)

Ctrl-C stops an answer. A message that begins with / is written with two.'''


class Chat:
    """One conversation with `engine` on a terminal. See the module for its state."""

    def __init__(
        self,
        engine: TextEngine,
        settings: Mapping[str, Any],
        make_params: Callable[[Mapping[str, Any]], Any],
        *,
        system: str | None = None,
        is_raw: bool = False,
        has_stats: bool = False,
        read_line: Callable[[str], str] = input,
        out: TextIO | None = None,
    ) -> None:
        self._engine = engine
        self._defaults = dict(settings)
        self.settings = dict(settings)
        self._make_params = make_params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._is_raw = is_raw or not engine.has_chat_template
        self._has_stats = has_stats
        self._read_line = read_line
        self._out = sys.stdout if out is None else out

    def run(self) -> None:
        """Talk until the user leaves.

        Raises:
            EngineDead: the engine ended; there is nothing left to talk to.
        """
        if self._is_raw:
            self._say("No chat template is used: each text is continued as it stands, without what went before.")
        self._say("/help shows what you can type; Ctrl-D leaves.")
        while True:
            try:
                text = self._read_message()
            except KeyboardInterrupt:
                self._say("\n(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                self._say("")
                return
            if text.startswith("/") and not text.startswith("//"):
                if not self._obey(text):
                    return
            elif text.strip():
                self._answer(text[1:] if text.startswith("//") else text)

    def _read_message(self) -> str:
        line = self._read_line(">>> ")
        if line.lstrip().startswith('"""'):
            lines = [line.lstrip()[3:]]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._read_line("... "))
            lines[-1] = lines[-1].rstrip()[:-3]
            return "\n".join(lines).strip("\n")
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line("... "))
        return "\n".join(lines)

    def _answer(self, text: str) -> None:
        kept = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            params = self._make_params(self.settings)
            stream = self._engine.stream(text, params) if self._is_raw else self._stream_chat(params)
            answer = show_answer(stream, self._out)
        except EngineDead:
            raise
        except TiercelError as error:
            self.messages = kept
            advice = "; /clear forgets the conversation" if isinstance(error, PromptTooLong) and kept else ""
            self._say(f"\ntiercel: {error}{advice}")
            return
        if answer.is_stopped:
            self._say("(stopped)")
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages = kept
        if self._has_stats:
            show_stats(self._engine, answer, sys.stderr)

    def _stream_chat(self, params: Any) -> Any:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._engine.stream_chat([*system, *self.messages], params)

    def _obey(self, text: str) -> bool:
        """Do a command; False is to leave."""
        name, _, rest = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._show_help,
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set_sampling,
        }
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name in commands:
            commands[name](rest.strip())
            return True
        import difflib

        near = difflib.get_close_matches(name, [*commands, "/exit"], n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        self._say(f"no command {name}{meant} (/help lists them; a message that begins with / is written //)")
        return True

    def _show_help(self, _: str) -> None:
        self._say(
            _HELP.format(names=", ".join(option.name for option in SAMPLING_OPTIONS if option.name != "temperature"))
        )

    def _clear(self, _: str) -> None:
        self.messages = []
        self._say("(forgotten)")

    def _set_system(self, text: str) -> None:
        if self._is_raw:
            self._say("no chat template is used, so a system message has no place")
            return
        if text:
            self.system = text
        self._say(f"system: {self.system or '(the model has its own, or none)'}")

    def _set_sampling(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            try:
                settings = self._changed(name.replace("-", "_"), value.strip())
                self._make_params(settings)
            except (ConfigError, RequestError) as error:
                self._say(f"/set {name}: {error}")
                return
            self.settings = settings
        for key, setting in self.settings.items():
            self._say(f"{key} = {setting}")

    def _changed(self, name: str, value: str) -> dict[str, Any]:
        option = next((option for option in SAMPLING_OPTIONS if option.name == name), None)
        if option is None or option.parse is None:
            known = ", ".join(option.name for option in SAMPLING_OPTIONS)
            raise ConfigError(f"no such setting; need one of {known}")
        settings = {key: setting for key, setting in self.settings.items() if key != name}
        if value == "default":
            return settings | {key: setting for key, setting in self._defaults.items() if key == name}
        return settings | {name: option.parse(value)}

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
