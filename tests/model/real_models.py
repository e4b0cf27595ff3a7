"""Where real models are, for the tests that need one: the store of fetched models, or the folder that
TIERCEL_TEST_MODELS names, or the one that tools/fetch_test_models.py fills. Nothing is fetched here.
"""

import os
from pathlib import Path

import pytest

from tiercel.hub.catalogue import load_catalogue
from tiercel.hub.store import ModelStore, default_folder

NAMES = ("smollm2-135m", "gemma3-270m")
# What the files are called in the folder, beside the catalogue's own name.
_OTHER_FILES = {"gemma3-270m": "gemma3-270m.gguf"}


def find_model(name):
    """Return a catalogue model's file, None when it is not on this machine."""
    entry = load_catalogue().find(name)
    stored = ModelStore().find(entry)
    if stored is not None:
        return stored
    folder = os.environ.get("TIERCEL_TEST_MODELS")
    files = [entry.file, _OTHER_FILES.get(name, entry.file)]
    return next((path for file in files if folder and (path := Path(folder) / file).is_file()), None)


def need_model(name):
    """As `find_model`; skips the test that asks when there is none."""
    path = find_model(name)
    if path is None:
        pytest.skip(f"{name} is not in the store (tiercel pull {name}), nor where TIERCEL_TEST_MODELS points")
    return path


def need_folder(name):
    """Return a folder of safetensors that is no catalogue model; skips the test that asks when there is none."""
    named = os.environ.get("TIERCEL_TEST_MODELS")
    for root in ([Path(named)] if named else []) + [default_folder().parent / "test-models"]:
        if (root / name / "model.safetensors").is_file():
            return root / name
    pytest.skip(f"{name} is not on this machine: python tools/fetch_test_models.py")
