"""Every error has an answer, in one shape, that tells nothing about the machine."""

import pytest

from tiercel.api import errors
from tiercel.base import errors as tree


def all_errors(kind=tree.TiercelError):
    yield kind
    for below in kind.__subclasses__():
        yield from all_errors(below)


def test_every_error_of_the_tree_has_its_own_row():
    of_tree = {kind for kind in all_errors() if kind.__module__ == tree.__name__}
    assert of_tree == set(errors.STATUSES)


def test_every_status_of_a_row_has_a_type():
    assert set(errors.STATUSES.values()) <= set(errors.TYPES)


def test_an_error_without_a_row_gets_that_of_the_nearest_one_above():
    class Special(tree.PromptTooLong):
        pass

    assert errors.status_of(Special("prompt: too long", param="prompt")) == 400


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (tree.RequestError("n: bad", param="n"), 400, "BadRequestError", "n"),
        (tree.UnknownModel("model: no"), 404, "NotFoundError", "model"),
        (tree.QueueFull("full"), 429, "RateLimitError", None),
        (tree.RequestFailed("nan"), 500, "InternalServerError", None),
        (tree.NoTokenAllowed("none"), 400, "BadRequestError", None),
        (tree.FormFailed("too much"), 400, "BadRequestError", None),
        (tree.UnsupportedModel("no"), 501, "NotImplementedError", None),
    ],
)
def test_an_error_becomes_its_body(error, status, kind, param):
    body = errors.body_of(error)
    assert body == {"error": {"message": str(error), "type": kind, "param": param, "code": status}}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("<_io.BytesIO object at 0x7f2c1a2b3c4d> is bad", "<_io.BytesIO object> is bad"),
        ("pointer 0x7f2c1a2b3c4d", "pointer "),
        ("no file /home/someone/models/x.gguf here", "no file <path> here"),
        (r"no file C:\models\x.gguf here", "no file <path> here"),
        ("model: got 'org/name'; tiny is served", "model: got 'org/name'; tiny is served"),
        ("1/2 of 3/4", "1/2 of 3/4"),
    ],
)
def test_a_message_loses_paths_and_addresses(message, told):
    assert errors.cleaned(message) == told


def test_a_long_message_is_cut():
    assert len(errors.cleaned("x" * 100_000)) < 3000
