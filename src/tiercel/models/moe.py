"""A mixture of experts as a feed-forward: its weights by name, and its ops. Shared by the models that have one.

An expert's matrices are tensors of their own, `<prefix>.experts.<e>.{gate,up,down}_proj.weight`; a checkpoint that
keeps them stacked is split by its loader (`loaders.stacked_experts`).
"""

from dataclasses import dataclass

from tiercel.models.fields import ConfigFields
from tiercel.ops.program import Value
from tiercel.ops.recorder import ExpertNames, Recorder
from tiercel.ops.routing import Routing

_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """A layer's experts: how many, how wide, how chosen, and their activation with its parameters."""

    routing: Routing
    intermediate_size: int
    act: str
    act_params: tuple[float, ...] = ()

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the router's and the experts' tensors; names follow the feed-forward's own."""
        n, f = self.routing.n_experts, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (n, hidden_size)}
        for e in range(n):
            shapes[f"experts.{e}.gate_proj.weight"] = (f, hidden_size)
            shapes[f"experts.{e}.up_proj.weight"] = (f, hidden_size)
            shapes[f"experts.{e}.down_proj.weight"] = (hidden_size, f)
        return shapes

    def record(self, rec: Recorder, prefix: str, h: Value, *, bias: str | None = None) -> Value:
        """Write the mixture over its normalised input; `bias` names what corrects the router's choice."""
        route = rec.router(rec.linear(h, f"{prefix}.gate.weight"), self.routing, bias=bias)
        names = ExpertNames(*(f"{prefix}.experts.{{}}.{p}_proj.weight" for p in ("gate", "up", "down")))
        return rec.experts(h, route, names, self.act, self.act_params, n_experts=self.routing.n_experts)


def read_experts(fields: ConfigFields, name: str, chosen_name: str, default: object, chosen_default: object) -> Routing:
    """Read how many experts there are (by `name` or `num_local_experts`) and how many a token goes to.

    Raises:
        ModelFileError: one is missing without a default, or more are chosen than there are.
    """
    # transformers has renamed the field; a config may have both.
    other = "num_local_experts"
    n = fields.size(name if fields.has(name) else other, default)
    if fields.has(name) and fields.size(other, n) != n:
        raise fields.broken(other, fields.raw(other), f"{name} {n}")
    k = fields.size(chosen_name, chosen_default)
    if n > _MAX_EXPERTS:
        raise fields.broken(name, n, f"at most {_MAX_EXPERTS} experts")
    if k > n:
        raise fields.broken(chosen_name, k, f"at most {name} {n}")
    return Routing(n_experts=n, top_k=k)
