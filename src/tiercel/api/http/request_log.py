"""The lines of the log that tell of requests: that one was answered, what it asked for, and what it got.

A line at INFO holds ids, parameters and counts; prompts and token ids are at DEBUG only; outputs only when asked for.
Texts are written as JSON strings, so that none can forge a line, and cut to `max_log_len`. Knows no engine.
"""

import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.api.http.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercel.api.http.service import Submission
    from tiercel.protocol.outputs import RequestOutput
    from tiercel.protocol.params import SamplingParams

_log = logging.getLogger(__name__)
_access_log = logging.getLogger(f"{__name__}.access")


class RequestLog:
    """Writes the lines of one server's requests, as far as its settings want them."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._unlogged = frozenset(settings.unlogged_paths)

    def answered(self, method: str, path: str, status: int, elapsed_s: float) -> None:
        """Tell of an answer. A path is what its client made up: never with its query, which may hold a key."""
        if not self._settings.has_access_log or path in self._unlogged or not _access_log.isEnabledFor(logging.INFO):
            return
        fields = {"method": method, "path": path[:200], "status": status, "duration_s": round(elapsed_s, 4)}
        shown = json.dumps(path[:200])[1:-1]
        _access_log.info("%s %s %d in %.1f ms", method, shown, status, 1000 * elapsed_s, extra={"fields": fields})

    def asked(self, request_id: str, submissions: "Sequence[Submission]") -> None:
        """Tell what a request asks of the engine."""
        if not self._settings.enable_log_requests or not _log.isEnabledFor(logging.INFO):
            return
        for i, one in enumerate(submissions):
            params = _told(one.params)
            fields = {"prompt_idx": i, "n_prompt_tokens": len(one.token_ids), "params": params}
            _log.info(
                "request %s asks: prompt %d of %d tokens, %s",
                request_id,
                i,
                len(one.token_ids),
                json.dumps(params),
                extra={"fields": fields},
            )
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug(
                    "request %s: prompt %d is %s, token ids %s",
                    request_id,
                    i,
                    self._cut(one.text),
                    one.token_ids[: self._settings.max_log_len],
                )

    def output_log(self, request_id: str) -> "OutputLog | None":
        """Give what watches a request's outputs, where they are logged."""
        if not self._settings.enable_log_outputs or not _log.isEnabledFor(logging.INFO):
            return None
        return OutputLog(self, request_id, has_deltas=self._settings.enable_log_deltas)

    def told(self, request_id: str, what: str, where: str, text: str, token_ids: list[int], reason: str | None) -> None:
        """Tell an output, or a piece of one."""
        fields = {"output": where, "finish_reason": reason, "n_tokens": len(token_ids)}
        shown = self._cut(text)
        _log.info("request %s %s: %s %s (%s)", request_id, what, where, shown, reason, extra={"fields": fields})
        _log.debug("request %s: %s has token ids %s", request_id, where, token_ids[: self._settings.max_log_len])

    def _cut(self, text: str | None) -> str:
        n = self._settings.max_log_len
        if text is None or n is None or len(text) <= n:
            return json.dumps(text)
        return f"{json.dumps(text[:n])}..."


class OutputLog:
    """Watches one request's outputs, whether they come whole or in pieces. Owned by its `Running`."""

    def __init__(self, log: RequestLog, request_id: str, *, has_deltas: bool) -> None:
        self._log = log
        self._request_id = request_id
        self._has_deltas = has_deltas
        self._texts: dict[str, list[str]] = {}
        self._ids: dict[str, list[int]] = {}

    def see(self, prompt_idx: int, output: "RequestOutput") -> None:
        """Take an output as its reader does."""
        for one in output.outputs:
            where = f"{prompt_idx}.{one.index}"
            texts, ids = self._texts.setdefault(where, []), self._ids.setdefault(where, [])
            texts.append(one.text)
            ids += one.token_ids
            if self._has_deltas and one.finish_reason is None:
                self._log.told(self._request_id, "gets", where, one.text, one.token_ids, None)
            if one.finish_reason is not None:
                self._log.told(self._request_id, "got", where, "".join(texts), ids, one.finish_reason)


def _told(params: "SamplingParams") -> dict[str, Any]:
    """Give the parameters that are not at their defaults."""
    plain = type(params)()
    given = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if getattr(params, name) != getattr(plain, name) and name != "output_kind"
    }
    told: dict[str, Any] = msgspec.to_builtins(given, str_keys=True)
    return told
