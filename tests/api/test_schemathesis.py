"""What Schemathesis makes of the server's own description, good and bad, never makes the server fail.

Derandomised: the same cases each time. By hand, `TIERCEL_N_EXAMPLES` in the environment asks for more of them.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from kit import Rig, error_of

schemathesis = pytest.importorskip("schemathesis")
N_EXAMPLES = int(os.environ.get("TIERCEL_N_EXAMPLES", "4"))


@pytest.fixture(scope="module")
def small():
    """Short answers, few of them: it is the requests that count."""
    limits = {"max_len_tokens": 48, "n_slots": 16}
    rig = Rig(limits=limits, settings={"n_outputs_max": 4, "n_prompts_max": 8}, check_each_step=False)
    yield rig
    rig.close()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_that_the_description_allows_or_forbids_makes_the_server_fail(small, mode):
    described = small.ask("GET", "/openapi.json").json()
    statuses = set()
    for found in schemathesis.openapi.from_dict(described).get_all_operations():
        operation = found.ok()
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing in it that could be forbidden

        @settings(
            max_examples=N_EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck
        )
        @given(operation.as_strategy(mode))
        def ask(case):
            status = answered(small, case)
            statuses.add(status)

        ask()
    small.assert_idle()
    assert statuses >= ({200, 400} if mode is schemathesis.GenerationMode.POSITIVE else {400})


def answered(rig, case):
    """Send one case; see that what it gets is an answer of this server, and not a failure."""
    sent = case.as_transport_kwargs(base_url="http://rig")
    shown = {name: sent.get(name) for name in ("method", "url", "json", "data", "params", "headers")}
    try:
        response = rig.ask(
            sent["method"],
            sent["url"],
            headers={name: value for name, value in (sent.get("headers") or {}).items() if value is not None},
            params=sent.get("params"),
            **({"json": sent["json"]} if "json" in sent else {"content": sent.get("data")}),
        )
    except UnicodeEncodeError:
        return None  # half a surrogate pair, which JSON in UTF-8 cannot be sent with
    assert response.status_code in (501, 503) or response.status_code < 500, (shown, response.text)
    if response.status_code >= 400 and not case.path.startswith("/v1/messages"):
        error_of(response.json(), response.status_code)
    return response.status_code
