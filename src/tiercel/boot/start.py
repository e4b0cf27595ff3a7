"""A start that is made of what the one before decided."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from tiercel.base import env, machine
from tiercel.base.config import EngineOptions, engine_rows
from tiercel.boot.plan import Plan, capacity_of
from tiercel.hub.resolve import ResolvedModel
from tiercel.hub.store import default_folder

if TYPE_CHECKING:
    from pathlib import Path

    from tiercel.runner.native import NativeRunner
    from tiercel.runner.ready import Begun, ReadyWeights


class Start:
    """The kept plan of one start (`runner.ready`): looked for at once, believed only when it was verified."""

    def __init__(self, options: EngineOptions, resolved: ResolvedModel) -> None:
        self._options, self._resolved = options, resolved
        self._begun: Begun | None = None
        self.is_used = False
        self._place: Path | None = None
        # With a quantization, packing is not all there is to do. A folder is not kept (see `ready`).
        if options.quantization not in (None, "none") or resolved.path.suffix != ".gguf":
            return
        says = options.speculative_config
        if (
            options.runner == "pooling" or "model" in says or says.get("method") == "mtp"
        ):  # which a kept plan does not know
            return
        from tiercel.runner import ready

        # Where a model came from decides nothing, and a key of the hub must not be written anywhere.
        source = {row.name for row in engine_rows("source")}
        source.add("kv_tiers")
        plain = {k: v for k, v in asdict(options).items() if k not in source} | {"isa": env.read(env.ISA)}
        path = resolved.path.absolute()
        try:
            self._key = ready.key_of(path, plain)
        except OSError:
            return
        self._place = ready.place_of(default_folder().parent / "plans", path, plain)
        self._n_threads = options.threads or machine.usable_cpus()
        self._begun = ready.begin(self._place, self._key, path, self._n_threads)

    def plan(self) -> Plan | None:
        """Return the kept plan, if there is one and it is of this very file; else stop packing."""
        begun, self._begun = self._begun, None
        if begun is None or not begun.is_same():
            return None
        from tiercel.runner.kept_plan import checkpoint_of, decided

        try:
            kept = decided(begun)
        except msgspec.MsgspecError:
            return None
        capacity = capacity_of(self._options, kept.info)
        # Rotary tables may depend on the length, and the length on what memory is free.
        if capacity.max_len_tokens != kept.max_len_tokens:
            return None
        checkpoint = checkpoint_of(begun, kept, self._resolved.path)
        self._begun, self.is_used = begun, True
        return Plan(
            self._options,
            self._resolved,
            checkpoint,
            kept.info,
            kept.program,
            capacity,
            self._n_threads,
            kept.identity,
            kept.placement,
        )

    def weights(self) -> "ReadyWeights | None":
        """Wait for what was begun."""
        begun, self._begun = self._begun, None
        return None if begun is None else begun.join()

    def keep(self, plan: Plan, runner: "NativeRunner") -> None:
        """Keep the plan for the next start, unless it came from there."""
        if self.is_used or self._place is None:
            return
        from tiercel.runner import ready
        from tiercel.runner.kept_plan import Decided, kept_of
        from tiercel.runner.native import matrices_of

        checkpoint = plan.checkpoint
        kept = kept_of(
            self._key,
            checkpoint,
            Decided(
                checkpoint.config,
                checkpoint.generation_config,
                checkpoint.norm_weights_include_one,
                plan.info,
                plan.lowered,
                runner.placement,
                plan.capacity.max_len_tokens,
                plan.identity,
            ),
            matrices_of(plan.lowered),
            expand_to_f32=plan.is_float32_compute,
        )
        if kept is not None:
            ready.save(self._place, kept)
