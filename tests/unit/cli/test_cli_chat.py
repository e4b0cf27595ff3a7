import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from tiercel.base.errors import EngineDead
from tiercel.cli.chat import Chat
from tiercel.cli.run import make_params

SETTINGS = {"max_tokens": None, "temperature": 0.7}


def talk(*lines, engine=None, **options):
    """Type `lines` into a chat; an exception among them is raised in its place."""
    waiting = iter(lines)

    def read_line(prompt):
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    engine = engine or FakeEngine()
    out = io.StringIO()
    chat = Chat(engine, SETTINGS, make_params, read_line=read_line, out=out, **options)
    chat.run()
    return chat, engine, out.getvalue()


def roles_and_texts(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_the_conversation_is_sent_whole_each_time():
    _, engine, _ = talk("one", "two")
    assert roles_and_texts(engine.asked[1]) == [("user", "one"), ("assistant", "You said: one"), ("user", "two")]


def test_an_empty_line_is_not_sent():
    assert talk("", "   ")[1].asked == []


def test_clear_forgets_the_conversation_and_keeps_the_system_message():
    _, engine, _ = talk("one", "/clear", "two", system="Be brief.")
    assert roles_and_texts(engine.asked[1]) == [("system", "Be brief."), ("user", "two")]


def test_the_system_message_can_be_set_and_shown():
    chat, engine, said = talk("/system", "/system Be kind.", "one", "/system")
    assert roles_and_texts(engine.asked[0])[0] == ("system", "Be kind.")
    assert chat.system == "Be kind."
    assert said.count("system: Be kind.") == 2


def test_a_line_that_ends_with_a_backslash_goes_on():
    assert talk("one\\", "two\\", "three")[1].asked[0][0]["content"] == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (['"""', "one", "/help", '"""'], "one\n/help"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""', "", "  x", '"""'], "  x"),
    ],
)
def test_a_text_between_triple_quotes_is_one_message(lines, text):
    assert talk(*lines)[1].asked[0][0]["content"] == text


def test_two_slashes_send_one():
    assert talk("//help me")[1].asked[0][0]["content"] == "/help me"


def test_an_unknown_command_is_not_sent_and_names_the_nearest():
    _, engine, said = talk("/hepl")
    assert engine.asked == []
    assert "did you mean /help?" in said


def test_help_names_every_command_and_setting():
    said = talk("/help")[2]
    for word in ("/set", "/system", "/clear", "/exit", "Ctrl-C", "top_p", "seed", "max_tokens"):
        assert word in said


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_leaving_ends_the_chat(word):
    assert talk(word, "one")[1].asked == []


def test_a_setting_changes_the_next_answer():
    _, engine, said = talk("/set temperature 0.2", "/set top-k 40", "one", "/set temperature default", "two")
    assert (engine.params[0].temperature, engine.params[0].top_k) == (0.2, 40)
    assert (engine.params[1].temperature, engine.params[1].top_k) == (0.7, 40)
    assert "temperature = 0.2" in said


@pytest.mark.parametrize(
    "line", ["/set temperature", "/set temperature x", "/set temperature -1", "/set colour red", "/set top_p 2"]
)
def test_a_bad_setting_is_told_and_changes_nothing(line):
    chat, _, said = talk(line)
    assert chat.settings == SETTINGS
    assert line[:8] in said


def test_settings_are_shown():
    assert "temperature = 0.7" in talk("/set")[2]


def test_a_refused_message_is_taken_back_and_the_chat_goes_on():
    chat, engine, said = talk("one", "long", "two")
    assert "got 99 tokens" in said
    assert "/clear" in said
    assert [text for role, text in roles_and_texts(engine.asked[2]) if role == "user"] == ["one", "two"]
    assert len(chat.messages) == 4


def test_ctrl_c_while_typing_does_not_leave():
    _, engine, said = talk(KeyboardInterrupt(), "one")
    assert len(engine.asked) == 1
    assert "/exit leaves" in said


def test_without_a_template_each_text_stands_alone_and_this_is_said():
    _, engine, said = talk("one", "two", "/system x", engine=FakeEngine(has_chat_template=False))
    assert engine.asked == ["one", "two"]
    assert "No chat template" in said
    assert "no place" in said


def test_raw_is_as_without_a_template():
    assert talk("one", is_raw=True)[1].asked == ["one"]


def test_a_dead_engine_ends_the_chat():
    class Dead(FakeEngine):
        def stream_chat(self, messages, params):
            raise EngineDead("the engine has ended")

    with pytest.raises(EngineDead):
        talk("one", "two", engine=Dead())


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from fake_engine import FakeEngine
from tiercel.cli import run
from tiercel.cli.main import main
from tiercel.hub.resolve import ResolvedModel

engine = FakeEngine()
run.open_engine = lambda model, options: engine
run.resolve = lambda name, **options: ResolvedModel(Path("/models/x"), "x", "path")
code = main(["run"])
print("aborted", engine.n_aborted, "asked", len(engine.asked), "closed", engine.is_closed, "code", code)
"""


class OnTerminal:
    """`tiercel run` with a fake engine on a pseudo-terminal."""

    def __init__(self, home):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "TIERCEL_HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            # A session of its own, so that the terminal's Ctrl-C reaches it and not the tests.
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.heard = ""

    def hear(self, pattern):
        """Read until `pattern` has come since the last time; return what matched."""
        while True:
            found = re.search(pattern, self.heard)
            if found:
                self.heard = self.heard[found.end() :]
                return found[0]
            try:
                piece = os.read(self.master, 4096)
            except OSError:  # how Linux says that the other side has closed
                piece = b""
            assert piece, f"ended before {pattern!r}; heard {self.heard!r}"
            self.heard += piece.decode()

    def press_until(self, key, pattern):
        """Press a key, and in turn a letter and the key again if nothing comes of it: a Ctrl-C just as CPython's
        readline takes a letter waits for the next letter, which a test is fast enough to meet; together in one write
        they would meet again.
        """
        for i in range(50):
            self.type(" " if i % 2 else key)
            while select.select([self.master], [], [], 0.5)[0]:
                self.heard += os.read(self.master, 4096).decode()
                if re.search(pattern, self.heard):
                    return self.hear(pattern)
        raise AssertionError(f"nothing came of {key!r}")

    def type(self, text):
        os.write(self.master, text.encode())

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def own_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell's background jobs ignore Ctrl-C, and so would what they start, tests and their chats included.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def on_terminal(tmp_path):
    chat = OnTerminal(tmp_path)
    # A chat that hangs must not hang the tests.
    previous = signal.signal(signal.SIGALRM, lambda *_: chat.process.kill())
    signal.alarm(60)
    yield chat
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    chat.end()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_chat_and_ctrl_d_leaves(on_terminal):
    chat = on_terminal
    chat.hear(r"/help shows")
    chat.hear(">>> ")
    chat.type("endless\n")
    chat.hear("on and on and on")
    chat.type("\x03")
    chat.hear(r"\(stopped\)")
    chat.hear(">>> ")
    chat.type("still there?\n")
    chat.hear(r"You said: still there\?")
    chat.hear(">>> ")
    chat.type("half a li")
    chat.hear("half a li")
    chat.press_until("\x03", r"/exit leaves")
    chat.hear(">>> ")
    chat.type("\x04")
    assert chat.hear(r"aborted.*code \d+") == "aborted 1 asked 2 closed True code 0"
    assert chat.process.wait() == 0


def test_on_a_terminal_an_earlier_line_can_be_called_back(on_terminal):
    chat = on_terminal
    chat.hear(">>> ")
    chat.type("hello\n")
    chat.hear("You said: hello")
    chat.hear(">>> ")
    # Up (Ctrl-P in readline) and Enter.
    chat.type("\x10\n")
    chat.hear("You said: hello")
    chat.hear(">>> ")
    chat.type("/exit\n")
    assert chat.hear(r"aborted.*code \d+") == "aborted 0 asked 2 closed True code 0"
