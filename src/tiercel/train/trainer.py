"""The loop: steps of AdamW until the budget is spent, with a state on disk every few minutes. Needs torch.

With `steps` the result is a function of the seed, the texts and the options (and torch's number of threads); with
`minutes` how far it comes depends on the machine, and the schedule follows the time that was spent, over all runs.
States: begun -> (`save`, as often as it is due) -> done. A run that Ctrl-C ends
has saved its last whole step; one that an error ends, what it had saved before.
"""

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tiercel.base.errors import TrainingFailed
from tiercel.train.batches import Batch
from tiercel.train.drafter import Drafter
from tiercel.train.state import Floats, TrainState

_BETAS = (0.9, 0.95)
_CLIP = 1.0
_LAST_FRAC = 0.03  # of the rate, at the end of the cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to train: `n_steps`, or `minutes` if that is None; and how fast to learn."""

    n_steps: int | None
    minutes: float
    learning_rate: float
    n_warmup: int = 60
    save_every_s: float = 240.0

    def done_frac(self, step: int, spent_s: float) -> float:
        """Return which part is spent, 0 to 1."""
        frac = step / self.n_steps if self.n_steps is not None else spent_s / (60.0 * self.minutes)
        return min(frac, 1.0)

    def rate(self, step: int, spent_s: float) -> float:
        """Return the rate of a step: a linear rise, then a cosine."""
        rise = min(1.0, (step + 1) / self.n_warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.done_frac(step, spent_s)))
        return self.learning_rate * rise * (_LAST_FRAC + (1.0 - _LAST_FRAC) * cosine)


class Interruption:
    """Makes a first Ctrl-C wait for the end of a step: a state from within one would be of no step. A second does not.

    Use as a context. In a thread that gets no signals it does nothing.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


class Trainer:
    """One run. Owns the tensors that are trained, and the optimiser."""

    def __init__(self, drafter: Drafter, state: TrainState, budget: Budget, device: str) -> None:
        self._drafter, self._budget = drafter, budget
        self._step, self._spent_s, self._history = state.step, state.spent_s, list(state.history)
        # Copies: what the optimiser overwrites belongs to nobody else.
        self.params = {
            name: torch.from_numpy(np.array(one)).to(device).requires_grad_() for name, one in state.params.items()
        }
        # The moments are set by hand, so that they are the state's own, tensors as all else.
        self._optimiser = torch.optim.AdamW(self.params.values(), lr=0.0, betas=_BETAS, weight_decay=0.0)
        for name, param in self.params.items():
            if state.first:
                self._optimiser.state[param] = {
                    "step": torch.tensor(float(state.step)),
                    "exp_avg": torch.from_numpy(np.array(state.first[name])).to(device),
                    "exp_avg_sq": torch.from_numpy(np.array(state.second[name])).to(device),
                }

    def run(
        self,
        batch_of: Callable[[int], Batch],
        look: Callable[["Trainer"], dict[str, Any]],
        save: Callable[[TrainState], None],
        on_step: Callable[[float, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> TrainState:
        """Train until the budget is spent; return the state then.

        `look` measures what the history tells; it is called whenever the state is saved.

        Raises: TrainingFailed: the loss is no number any more; the state saved before is kept.
        """
        began, before_s = clock(), self._spent_s
        saved_s = self._spent_s
        with Interruption() as interruption:
            while self._budget.done_frac(self._step, self._spent_s) < 1.0:
                words = self._one_step(batch_of(self._step))
                self._spent_s = before_s + clock() - began
                on_step(self._budget.done_frac(self._step, self._spent_s), words)
                if self._spent_s - saved_s >= self._budget.save_every_s:
                    self._note(look)
                    save(self.state())
                    # Looking and saving are not training: they take nothing of its minutes.
                    began, before_s = clock(), self._spent_s
                    saved_s = self._spent_s
                if interruption.is_asked:
                    save(self.state())
                    raise KeyboardInterrupt
        self._note(look)
        state = self.state()
        save(state)
        return state

    def state(self) -> TrainState:
        """Return how far it is."""
        kept = self._optimiser.state
        return TrainState(
            step=self._step,
            spent_s=self._spent_s,
            params=self.numpy(),
            first={name: _numpy(kept[p]["exp_avg"]) for name, p in self.params.items() if p in kept},
            second={name: _numpy(kept[p]["exp_avg_sq"]) for name, p in self.params.items() if p in kept},
            history=list(self._history),
        )

    def numpy(self) -> dict[str, Floats]:
        """Return the tensors as they are now."""
        return {name: _numpy(param) for name, param in self.params.items()}

    def _one_step(self, batch: Batch) -> str:
        rate = self._budget.rate(self._step, self._spent_s)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        loss = self._drafter.loss(self.params, self._drafter.tensors(batch))
        total = float(loss.total.detach())
        if not math.isfinite(total):
            raise TrainingFailed(
                f"train: the loss of step {self._step} is {total}; it must be a number; what was saved before is kept; "
                "give --learning-rate a smaller value and another --out"
            )
        loss.total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.params.values(), _CLIP))
        if not math.isfinite(norm):
            raise TrainingFailed(
                f"train: the gradient of step {self._step} is {norm}; it must be a number; what was saved before is "
                "kept; give --learning-rate a smaller value and another --out"
            )
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._step += 1
        return f"step {self._step}, loss {total:.2f}, first slot {float(loss.first_overlap):.2f}"

    def _note(self, look: Callable[["Trainer"], dict[str, Any]]) -> None:
        if self._history and self._history[-1]["step"] == self._step:
            return  # a run that was done already
        self._history.append({"step": self._step, "spent_s": round(self._spent_s, 1), **look(self)})


def _numpy(tensor: Tensor) -> Floats:
    # A copy: on the CPU it would be the optimiser's own memory, which it overwrites while the state is written.
    array: Floats = tensor.detach().cpu().numpy().astype(np.float32, copy=True)
    return array
