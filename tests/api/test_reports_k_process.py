"""Public reports about processes and options elsewhere, each tried here; `docs/reports.md` lists the rows."""

import asyncio
import subprocess
import sys

import httpx
import pytest
from kit import GatedRunner, wait_until
from scripted import CHAT, COMPLETE, HI

from tiercel.api.http.address import take_address
from tiercel.api.http.settings import ServerSettings


def test_v8204_a_port_that_is_taken_is_told_before_anything_of_the_model_is_read(tmp_path):
    """The folder holds no model: that would be told next."""
    address = take_address(ServerSettings(port=0, served_names=("x",)))
    try:
        port = address.listener.getsockname()[1]
        words = [sys.executable, "-m", "tiercel", "serve", str(tmp_path), "--port", str(port)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        address.close()
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert str(port) in line
    assert "in use" in line


class Dying(GatedRunner):
    """Breaks the engine's loop at its third step."""

    def collect(self):
        result = super().collect()
        assert self.n_steps_run < 3, "a fault of the runner"
        return result


@pytest.mark.parametrize("is_stream", [True, False])
def test_t3050_when_the_engine_dies_everybody_is_told_and_nobody_hangs(make_rig, is_stream):
    rig = make_rig(runner=Dying, async_scheduling=False)

    async def ask():
        transport = httpx.ASGITransport(rig.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            ask = {"max_tokens": 50, "stream": is_stream, "ignore_eos": True}
            posts = [client.post(COMPLETE, json=ask | {"prompt": "hello"}) for _ in range(2)]
            posts += [client.post(CHAT, json=ask | {"messages": HI})]
            tasks = [asyncio.create_task(post) for post in posts]
            await asyncio.to_thread(wait_until, lambda: len(rig.client._owners) == 3)
            rig.runner.open()
            return await asyncio.gather(*tasks)

    for response in asyncio.run(ask()):
        if is_stream:
            assert response.text.count('"error"') == 1
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.status_code == 500
    assert rig.ask("GET", "/health").status_code == 503
    late = rig.ask("POST", COMPLETE, json={"prompt": "x", "max_tokens": 1})
    assert late.status_code in (500, 503)
    assert rig.service.n_open == 0


def test_v55994_every_described_route_is_there_and_every_route_is_described(rig):
    described = rig.ask("GET", "/openapi.json").json()["paths"]
    assert len(described) > 15
    for path, methods in described.items():
        for method in methods:
            response = rig.ask(method.upper(), path.replace("{response_id}", "resp_x").replace("{model}", "tiny"))
            assert response.status_code != 405, (method, path)
            is_missing_route = response.status_code == 404 and "route" in response.text
            assert not is_missing_route or "it is off" in response.text, (method, path)
