"""How a router chooses experts, as a value that recorded and lowered programs carry."""

from typing import Literal

import msgspec

_MAX_GROUP_TOP = 8


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """How experts are chosen. `group_top` best of a group's experts make its score; `n_groups_kept` groups stay."""

    n_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    n_groups: int = 1
    n_groups_kept: int = 1
    group_top: int = 1
    renormalises: bool = True
    scale: float = 1.0

    def broken(self) -> str | None:
        """Return what is wrong with the numbers, or None."""
        if min(self.n_experts, self.top_k, self.n_groups, self.n_groups_kept, self.group_top) < 1:
            return "a count below 1"
        if self.scores not in ("softmax", "sigmoid"):
            return f"scores {self.scores!r}; softmax or sigmoid"
        if self.n_experts % self.n_groups or self.n_groups_kept > self.n_groups:
            return f"{self.n_groups_kept} of {self.n_groups} groups of {self.n_experts} experts; groups of equal size"
        size = self.n_experts // self.n_groups
        if self.group_top > min(size, _MAX_GROUP_TOP):
            return f"group_top {self.group_top} of groups of {size}; at most that and {_MAX_GROUP_TOP}"
        if self.top_k > size * self.n_groups_kept:
            return f"top_k {self.top_k} of {size * self.n_groups_kept} experts in the kept groups; no more than these"
        return None if 0.0 < self.scale < float("inf") else f"scale {self.scale}; a positive number"

    def __str__(self) -> str:
        groups = f" groups={self.n_groups_kept}/{self.n_groups} by {self.group_top}" if self.n_groups > 1 else ""
        renormalises = " renormalised" if self.renormalises else ""
        return f"{self.scores} top {self.top_k}{groups}{renormalises} scale={self.scale:.9g}"
