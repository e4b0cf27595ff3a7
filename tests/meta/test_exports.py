"""`import tiercel` costs nothing, and what it promises is there."""

import subprocess
import sys

import pytest

import tiercel

HEAVY = ("numpy", "tokenizers", "huggingface_hub", "jinja2", "msgspec", "starlette", "uvicorn", "rich", "safetensors")


@pytest.mark.parametrize("name", tiercel.__all__)
def test_every_promised_name_resolves(name):
    assert getattr(tiercel, name).__name__ == name


def test_dir_lists_what_is_promised():
    assert set(tiercel.__all__) <= set(dir(tiercel))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        tiercel.no_such_name  # noqa: B018


def loaded_after(statement):
    """Give the top-level names that a fresh interpreter has loaded after a statement."""
    script = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import tiercel") & {*HEAVY, "torch", "transformers", "asyncio"} == set()


def test_the_command_line_starts_without_anything_heavy():
    assert loaded_after("import tiercel.cli.main") & {*HEAVY, "torch", "transformers", "asyncio"} == set()


def test_the_engine_loads_neither_torch_nor_a_server():
    loaded = loaded_after("import tiercel.boot, tiercel.engine.client, tiercel.runner.native, tiercel.llm.llm")
    later = {"tokenizers", "jinja2", "huggingface_hub", "rich", "tqdm", "starlette", "uvicorn", "prometheus_client"}
    assert loaded & {"torch", "transformers", *later} == set()


def test_the_command_that_trains_looks_for_torch_before_it_loads_it():
    loaded = loaded_after("import tiercel.cli.train_drafter, tiercel.train.run")
    assert "torch" not in loaded
