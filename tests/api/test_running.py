"""A result that comes while whoever asked for it is cancelled is handed to the one who frees it."""

import asyncio

import pytest

from tiercel.api.http.running import ClientGone, until_gone


async def stays():
    await asyncio.Event().wait()
    raise AssertionError


async def leaves():
    return {"type": "http.disconnect"}


async def _cancelled_just_after(result_is_there):
    freed, ready = [], asyncio.Event()

    async def work():
        await ready.wait()
        return "a result"

    task = asyncio.create_task(until_gone(stays, work(), on_unwanted=freed.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if result_is_there:
        ready.set()
        await asyncio.sleep(0)  # `work` returns, and `until_gone` is not told yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return freed


@pytest.mark.parametrize("result_is_there", [True, False])
def test_a_result_is_freed_when_its_reader_was_cancelled_and_only_then(result_is_there):
    assert asyncio.run(_cancelled_just_after(result_is_there)) == ["a result"] * result_is_there


def test_a_result_that_is_returned_is_not_freed():
    freed = []

    async def work():
        return 7

    assert asyncio.run(until_gone(stays, work(), on_unwanted=freed.append)) == 7
    assert freed == []


def test_work_that_failed_raises_and_has_nothing_to_free():
    freed = []

    async def work():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(until_gone(stays, work(), on_unwanted=freed.append))
    assert freed == []


def test_work_is_cancelled_when_the_client_leaves():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ClientGone):
        asyncio.run(until_gone(leaves, work()))
    assert ended == [True]
