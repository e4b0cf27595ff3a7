"""Shape rules and costs of a mixture's ops, and their attributes as values; `ops.vocabulary` lists the ops."""

from typing import Literal, cast

from tiercel.base.errors import ShapeError
from tiercel.ops import costs
from tiercel.ops.activations import ACTIVATIONS, broken_activation
from tiercel.ops.costs import Cost
from tiercel.ops.dims import ACTIVATION_GROUP, Bounds, Dim
from tiercel.ops.program import OpCall
from tiercel.ops.routing import Routing


def params_of(call: OpCall) -> tuple[float, ...]:
    """Return the parameters of a call's activation, in the order that `ACTIVATIONS` gives them."""
    return tuple(call.real(name) for name in ACTIVATIONS.get(call.word("act"), ()))


def routing_of(call: OpCall) -> Routing:
    """Return how a router call chooses."""
    return Routing(
        n_experts=call.inputs[0].width,
        top_k=call.integer("top_k"),
        scores=cast("Literal['softmax', 'sigmoid']", call.word("scores")),
        n_groups=call.integer("n_groups"),
        n_groups_kept=call.integer("n_groups_kept"),
        group_top=call.integer("group_top"),
        renormalises=bool(call.integer("renormalises")),
        scale=call.real("scale"),
    )


def router(call: OpCall) -> tuple[Dim, int]:
    """Give a router's shape."""
    logits, bias, routing = call.inputs[0], call.weights.get("bias"), routing_of(call)
    _need(bias is None or bias.shape == (logits.width,), call, f"logits {logits.width} wide, bias {bias}", "bias [X]")
    fault = routing.broken()
    _need(fault is None, call, f"{fault}", "a choice among the experts")
    return logits.rows, 2 * routing.top_k


def experts(call: OpCall) -> tuple[Dim, int]:
    """Give an experts' shape."""
    x, route = call.inputs
    gate, up, down = (call.weights[name] for name in ("gate", "up", "down"))
    n, shown = gate.n_experts, f"x width {x.width}, gate {gate}, up {up}, down {down}"
    _need(n >= 1 and up.n_experts == down.n_experts == n, call, shown, "as many of each")
    fits = len(gate.shape) == len(down.shape) == 2 and gate.shape == up.shape
    fits = fits and gate.shape[1] == x.width and down.shape[1] == gate.shape[0]
    _need(fits, call, shown, "gate and up [F, width of x], down [N, F]")
    _need(route.rows is x.rows and route.width % 2 == 0, call, f"route {route.type_text}", "a router's result")
    for name, width in (("gate", gate.shape[0]), ("up", gate.shape[0]), ("down", down.shape[0])):
        bias = call.weights.get(f"{name}_bias")
        _need(
            bias is None or (bias.shape == (width,) and bias.n_experts == n), call, f"{bias}", f"{n} biases [{width}]"
        )
    fault = broken_activation(call.word("act"), params_of(call))
    _need(fault is None, call, f"{fault}", "a known activation")
    for name, width in (("x", x.width), ("hidden", gate.shape[0])):
        word = call.word(name)
        fits = word == "f32" or (word == "q8" and width % ACTIVATION_GROUP == 0)
        _need(fits, call, f"{name} {word!r} of width {width}", "f32, or q8 in groups of 32")
    return x.rows, down.shape[0]


def router_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Count a router's operations and bytes."""
    return costs.rows(bounds.of(call.output.rows), call.inputs[0].width, call.output.width, 6)


def experts_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Count what the chosen experts compute and read."""
    families = [call.weights[name] for name in ("gate", "up", "down")]
    each = [(w.n_weights // w.n_experts, w.nbytes // w.n_experts) for w in families]
    x, route = call.inputs
    m, n = bounds.of(call.output.rows), families[0].n_experts
    return costs.experts(m, n, route.width // 2, each, x.width, call.output.width)


def _need(holds: bool, call: OpCall, got: str, needed: str) -> None:
    if not holds:
        names = ", ".join(w.name for w in call.weights.values())
        raise ShapeError(f"ops.{call.op}({names}): got {got}; {needed} is needed")
