"""Two vocabularies side by side: which token of one is which of the other. Knows plain bytes, no tokenizer.

A token's bytes decide. Those that both have are shared; the first id counts where several have the same bytes. A token
of the target's that the drafter's vocabulary lacks is written with the longest tokens that fit, one after the other.

Invariant (`check`): what is shared comes back as itself, both ways.

Source: token-level intersection (Timor et al. 2025, arXiv 2502.05202); that what is not shared is written in other
tokens is ours.
"""

from collections.abc import Iterable, Sequence


class VocabularyMap:
    """From a target's ids to a drafter's, and back. `target[i]` and `draft[i]`: what token i adds to a text."""

    def __init__(self, target: Sequence[bytes], draft: Sequence[bytes]) -> None:
        self._target = target
        self._draft_ids: dict[bytes, int] = {}
        for i, text in enumerate(draft):
            if text:
                self._draft_ids.setdefault(text, i)
        self._n_bytes_max = max(map(len, self._draft_ids), default=0)
        target_ids: dict[bytes, int] = {}
        for i, text in enumerate(target):
            if text:
                target_ids.setdefault(text, i)
        self._to_target = {i: target_ids[text] for text, i in self._draft_ids.items() if text in target_ids}
        self._written: dict[int, tuple[int, ...]] = {}  # at most the target's vocabulary

    @property
    def n_shared(self) -> int:
        """Tokens that both have."""
        return len(self._to_target)

    def to_target(self, draft_id: int) -> int:
        """Give the target's token; -1: it has none."""
        return self._to_target.get(draft_id, -1)

    def to_draft(self, target_ids: Iterable[int]) -> list[int]:
        """Write the target's tokens in the drafter's. Bytes that its vocabulary lacks are left out."""
        found: list[int] = []
        for i in target_ids:
            own = self._written.get(i)
            if own is None:
                own = self._written[i] = self._write(self._target[i] if 0 <= i < len(self._target) else b"")
            found += own
        return found

    def _write(self, text: bytes) -> tuple[int, ...]:
        found, at = [], 0
        while at < len(text):
            for n in range(min(self._n_bytes_max, len(text) - at), 0, -1):
                token = self._draft_ids.get(text[at : at + n])
                if token is not None:
                    found.append(token)
                    at += n
                    break
            else:
                at += 1
        return tuple(found)

    def check(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        for draft_id, target_id in self._to_target.items():
            assert self.to_draft([target_id]) == [draft_id], f"vocabulary: {draft_id} comes back as another token"
