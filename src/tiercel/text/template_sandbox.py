"""A Jinja environment in which a stranger's template can neither reach outside nor run away.

Jinja's own sandbox keeps a template from Python's internals; it bounds neither time nor memory. Here every turn of a
loop, every call of a macro and everything printed is charged to the budget of the rendering, and whatever makes
something long out of something short (`*`, `~`, `join`, `replace`, formatting with widths) asks for room first.

The environment is shared by threads; the budget of a rendering is the thread's own. It knows no messages or models.
"""

import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

_N_INT_BITS_MAX: Final = 4096
_N_ITEMS_MAX: Final = 100_000  # of a list made by + or *; Jinja's range() has the same bound
_N_ITEMS_PER_TURN: Final = 256  # that a list is made of, in the time that one turn of a loop takes
_FORMAT_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*[\d*]")
_TIME_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*\d")
# Methods that make a text as long as a number says. No chat template needs them.
_DENIED_ATTRIBUTES: Final = frozenset(
    {"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "translate", "format_map", "maketrans"}
)
_DENIED_FILTERS: Final = (
    "batch",
    "center",
    "filesizeformat",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)


class BudgetExceeded(TemplateError):
    """A rendering took more than its share of time, turns or text."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still use."""

    n_turns: int
    n_chars: int
    deadline_s: float
    clock: Callable[[], float]

    def spend(self, *, turns: int = 0, chars: int = 0) -> None:
        """Charge turns of loops and characters of output.

        Raises:
            BudgetExceeded: there is not enough left.
        """
        self.n_turns -= turns
        self.n_chars -= chars
        if self.n_turns < 0 or self.n_chars < 0:
            raise BudgetExceeded(f"too many {'turns of its loops' if self.n_turns < 0 else 'characters of output'}")
        if self.clock() > self.deadline_s:
            raise BudgetExceeded("too much time")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, with the bounds described above.

    Source: the names and flags of Hugging Face's `apply_chat_template`. We differ in the filters and methods that are
    missing (they make long texts out of numbers) and in accepting the body of `{% generation %}` without recording it.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding would compute constants while compiling, outside of any budget.
            optimized=False,
            extensions=[loopcontrols, _Generation],
            finalize=self._finalize,
        )
        self._local = threading.local()
        for name in _DENIED_FILTERS:
            del self.filters[name]
        self.filters.update(
            tojson=self._to_json,
            indent=self._indent,
            join=self._join_filter,
            list=self._list,
            replace=self._replace_filter,
            format=self._format_filter,
            string=self._finalize_text,
            sum=self._sum,
        )
        del self.globals["lipsum"]
        self.globals.update(
            range=self._range, raise_exception=_raise_exception, strftime_now=lambda form: _strftime(now(), form)
        )

    @contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        """Charge what this thread renders inside to `budget`."""
        self._local.budget = budget
        try:
            yield
        finally:
            del self._local.budget

    def _spend(self, *, turns: int = 0, chars: int = 0) -> None:
        budget: Budget | None = getattr(self._local, "budget", None)
        if budget is not None:
            budget.spend(turns=turns, chars=chars)

    def bounded(self, template: nodes.Template) -> nodes.Template:
        """Give the parsed template with the charges put in. Must be done once, before it is compiled."""
        charged = _Charges().visit(template)
        assert isinstance(charged, nodes.Template)
        return charged

    # Called by the compiled template; see _Charges.

    def turn(self, n_chars: int) -> str:
        """Charge one turn of a loop or call of a macro whose own text has `n_chars` characters."""
        self._spend(turns=1, chars=n_chars)
        return ""

    def concatenate(self, *values: object) -> str:
        """Do what `~` does."""
        return "".join([self._finalize_text(value) for value in values])

    def _finalize(self, value: object) -> object:
        """Charge a value that is about to be printed."""
        return self._finalize_text(value) if not isinstance(value, Undefined) else value

    def _finalize_text(self, value: object) -> str:
        self._weigh(value)
        return value if isinstance(value, str) else str(value)

    def _weigh(self, value: object) -> None:
        """Charge a value before it is made a text: a few lists of lists can print as terabytes."""
        stack: list[object] = [value]
        while stack:
            one = stack.pop()
            if isinstance(one, str):
                self._spend(chars=len(one))
            elif isinstance(one, Mapping):
                self._spend(turns=len(one))
                stack += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                self._spend(turns=len(one))
                stack += one
            elif isinstance(one, int | float | None | Undefined | date):
                self._spend(chars=20)
            else:
                # An object's text is its address in memory.
                raise SecurityError(f"printing a {type(one).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that can make something long, after asking whether it will."""
        if operator == "%" and isinstance(left, str):
            return self._format(left, right)
        if isinstance(left, int) and isinstance(right, int):
            n_bits = {
                "*": left.bit_length() + right.bit_length(),
                "**": left.bit_length() * max(right, 0) if right < 1 << 20 else _N_INT_BITS_MAX + 1,
            }.get(operator, 0)
            if n_bits > _N_INT_BITS_MAX:
                raise BudgetExceeded("too large a number")
        elif operator == "*" and isinstance(left, str | list | tuple | bytes) and isinstance(right, int):
            self._check_room(left, len(left) * max(right, 0))
        elif operator == "*" and isinstance(right, str | list | tuple | bytes) and isinstance(left, int):
            self._check_room(right, len(right) * max(left, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            self._check_room(left, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _check_room(self, kind: object, length: int) -> None:
        if isinstance(kind, str | bytes):
            self._spend(chars=length)
        elif length > _N_ITEMS_MAX:
            raise BudgetExceeded("too long a list")
        else:
            self._spend(turns=length // _N_ITEMS_PER_TURN)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Tell whether a template may read an attribute."""
        return attr not in _DENIED_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap `str.format`, which Jinja guards against attributes but not against widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__

        def guarded(*args: Any, **kwargs: Any) -> str:
            if ":" in form or "!" in form:
                raise SecurityError("str.format with a format specification")
            self._spend(chars=len(form))
            for arg in (*args, *kwargs.values()):
                self._weigh(arg)
                self._spend(chars=len(arg) * form.count("{") if isinstance(arg, str) else 0)
            return self._charged(wrapped(*args, **kwargs))

        return guarded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, after asking whether its result will be long."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "replace" and len(args) >= 2:
                return self._replace_filter(owner, *args, **kwargs)
            if name == "join" and args:
                return self._join_filter(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def _charged(self, text: str) -> str:
        self._spend(chars=len(text))
        return text

    def _range(self, *bounds: int) -> range:
        numbers = safe_range(*bounds)
        self._spend(turns=len(numbers) // _N_ITEMS_PER_TURN)
        return numbers

    def _list(self, values: Iterable[Any]) -> list[Any]:
        items = list(values)
        self._spend(turns=len(items) // _N_ITEMS_PER_TURN)
        return items

    def _join_filter(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._spend(chars=len(d) * len(items))
        return d.join([self._finalize_text(item) for item in items])

    def _replace_filter(self, s: Any, old: str, new: str, count: int | None = None) -> str:
        text = self._finalize_text(s)
        n_found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self._spend(chars=n_found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _format_filter(self, form: Any, *args: Any, **kwargs: Any) -> str:
        return self._format(self._finalize_text(form), kwargs or args)

    def _format(self, form: str, values: Any) -> str:
        if _FORMAT_WIDTH.search(form):
            raise SecurityError("formatting with a width")
        self._weigh(values)
        several = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
        # A named value may be printed as often as it is named.
        self._spend(chars=form.count("%") * max((len(one) for one in several if isinstance(one, str)), default=0))
        return self._charged(form % values)

    def _indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        n = len(width) if isinstance(width, str) else width
        self._spend(chars=max(n, 0) * (s.count("\n") + 1))
        return str(FILTERS["indent"](s, width, first, blank))

    def _sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        items = [self.getitem(v, attribute) if attribute is not None else v for v in values]
        if not all(isinstance(item, int | float) for item in (*items, start)):
            raise SecurityError("a sum of things that are not numbers")
        return sum(items, start)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 64:
            raise SecurityError("tojson with so wide an indent")
        self._weigh(value)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self._charged(text)


class _Charges(NodeTransformer):
    """Puts `environment.turn(n)` into the bodies of loops and macros, and our function in the place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._charge(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._charge(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._charge(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)

    def _charge(self, node: Any) -> nodes.Node:
        n_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        call = _call("turn", [nodes.Const(n_chars, lineno=node.lineno)], node.lineno)
        node.body = [nodes.ExprStmt(call, lineno=node.lineno), *node.body]
        if isinstance(node, nodes.For) and node.test is not None:
            # The test runs for elements that the body never sees.
            node.test = nodes.And(nodes.Not(call, lineno=node.lineno), node.test, lineno=node.lineno)
        result: nodes.Node = node
        return result


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), args, [], None, None, lineno=line)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the model wrote; its inside is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message)[:500])


def _strftime(now: datetime, form: str) -> str:
    if len(form) > 256 or _TIME_WIDTH.search(form):
        raise SecurityError("strftime_now with a width or a long format")
    return now.strftime(form)
