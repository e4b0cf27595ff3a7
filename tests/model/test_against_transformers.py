"""Tiny models with every branch on, against logits that transformers computed (tools/make_fixtures.py)."""

import numpy as np
import pytest

CHUNKS = {
    "prefill": lambda n: [n],
    "token-by-token": lambda n: [1] * n,
    "ragged": lambda n: [1, 7, 2, 13, 1, 1, 9, n - 34],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_equal_those_of_transformers(tiny, backend, chunks):
    expected = tiny.expected
    n_tokens = len(expected["token_ids"])
    logits = backend.run(tiny.program, tiny.weights, expected["token_ids"], chunks(n_tokens))
    assert logits.shape == (n_tokens, tiny.model.info.vocab_size)
    columns = np.array(expected["columns"])
    assert np.abs(logits[:, : columns.shape[1]] - columns).max() <= backend.tolerance
    for t, row in expected["rows"].items():
        assert np.abs(logits[int(t)] - np.array(row)).max() <= backend.tolerance
    # A tie within the tolerance may fall either way.
    best = np.take_along_axis(logits, np.array(expected["argmax"])[:, None], axis=1)[:, 0]
    assert np.all(logits.max(axis=1) - best <= 2 * backend.tolerance)


def test_fixtures_distinguish_positions(tiny):
    """A fixture whose rows were all alike would hide a wrong mask or rotation."""
    assert np.ptp(np.array(tiny.expected["columns"]), axis=0).min() > 0.1
