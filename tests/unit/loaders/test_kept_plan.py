"""Plans that are kept between starts: used for exactly what they were made of, and for nothing else."""

import contextlib
import gc
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import model_bytes as mb
import numpy as np
import pytest

from tiercel.base.config import EngineOptions
from tiercel.boot import engine as engine_module
from tiercel.boot.engine import build_engine
from tiercel.boot.plan import make_plan
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.protocol.params import SamplingParams
from tiercel.runner import ready

PROMPT = [3, 17, 5, 29, 8, 11, 2, 30]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home; returns the folder of kept plans."""
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "plans"


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def model(put, request):
    return write(put, request.param)


def write(put, arch="llama", seed=0, name="model.gguf"):
    rng = np.random.default_rng(seed)
    tensors = {}
    for tensor, shape in mb.shapes(arch).items():
        values = rng.normal(0, 0.3, shape).astype("<f2" if len(shape) == 2 else "<f4")
        tensors[tensor] = ("f16" if len(shape) == 2 else "f32", shape, values.tobytes())
    return put(mb.gguf(mb.metadata(arch), tensors), name)


@contextlib.contextmanager
def engine_of(path, **options):
    options = {"threads": 2, "max_num_seqs": 2, "skip_tokenizer_init": True, **options}
    engine = build_engine(EngineOptions(model=str(path), **options))
    try:
        yield engine
    finally:
        engine.close()


def is_from_kept(engine):
    """A plan that was decided anew has no placement: the runner makes one."""
    return engine.plan.placement is not None


def answer(engine):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    ((_, output),) = engine.client.generate_many([PROMPT], params)
    logits = engine.runner.last_logits(1).tobytes()
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs, logits


def facts(engine):
    plan = engine.plan
    return plan.info, plan.lowered.text(), plan.identity, plan.capacity.max_len_tokens, plan.checkpoint.digest()


@pytest.mark.parametrize("compute_dtype", ["auto", "float32"])
def test_a_start_from_a_kept_plan_computes_the_same_bits(home, model, compute_dtype):
    with engine_of(model, compute_dtype=compute_dtype) as first:
        assert not is_from_kept(first)
        want, known = answer(first), facts(first)
    with engine_of(model, compute_dtype=compute_dtype) as second:
        assert is_from_kept(second)
        assert answer(second) == want
        assert facts(second) == known
        assert second.plan.program.text() == make_plan(second.plan.options).program.text()


def test_an_engine_from_a_kept_plan_that_is_closed_lets_go_of_the_file(home, put):
    path = write(put)
    for _ in range(2):
        with engine_of(path) as engine:
            pass
        del engine
        gc.collect()
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_the_kept_file_is_its_owners_alone(home, put):
    with engine_of(write(put)):
        (kept,) = home.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_weights_that_changed_under_the_same_name_size_and_time_are_read_anew(home, put, arch):
    path = write(put, arch)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with engine_of(path) as engine:
        before = answer(engine)
    size = path.stat().st_size
    write(put, arch, seed=1)
    os.utime(path, ns=times)
    assert path.stat().st_size == size
    with engine_of(path) as engine:
        assert not is_from_kept(engine)
        after = answer(engine)
    assert after != before
    with engine_of(path) as engine:
        assert is_from_kept(engine)
        assert answer(engine) == after


def test_a_file_that_shrank_is_refused_as_ever(home, put):
    path = write(put)
    with engine_of(path):
        pass
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ValueError, match="truncated"), engine_of(path):
        pass


@pytest.mark.parametrize(
    "change",
    [
        {"compute_dtype": "float32"},
        {"kv_cache_dtype": "float32"},
        {"max_model_len": 64},
        {"max_num_seqs": 3},
        {"threads": 1},
    ],
    ids=str,
)
def test_other_options_are_another_plan(home, put, change):
    path = write(put)
    with engine_of(path):
        pass
    with engine_of(path, **change) as engine:
        assert not is_from_kept(engine)
        want = answer(engine)
    with engine_of(path, **change) as engine:
        assert is_from_kept(engine)
        assert answer(engine) == want


def test_another_version_or_another_level_of_kernels_is_a_miss(home, put, monkeypatch):
    path = write(put)
    with engine_of(path):
        pass
    monkeypatch.setattr(ready, "__version__", "0.0.0")
    with engine_of(path) as engine:
        assert not is_from_kept(engine)
    monkeypatch.undo()
    monkeypatch.setenv("TIERCEL_HOME", str(home.parent))
    monkeypatch.setenv("TIERCEL_ISA", "scalar")
    with engine_of(path) as engine:
        assert not is_from_kept(engine)


def test_a_change_of_our_own_sources_is_a_miss(tmp_path):
    options = {"threads": 1}
    key = ready.key_of(tmp_path / "a.gguf", options)
    assert key == ready.key_of(tmp_path / "a.gguf", options)
    assert key != ready.key_of(tmp_path / "b.gguf", options)
    assert '"lowered.py"' in key
    assert '"start.py"' in key
    assert "_core" in key


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign", "moved", "a folder"])
def test_a_damaged_or_foreign_file_is_ignored_and_written_again(home, put, damage):
    path, other = write(put), write(put, seed=2, name="other.gguf")
    with engine_of(path) as engine:
        want = answer(engine)
    (kept,) = home.iterdir()
    whole = kept.read_bytes()
    if damage == "a folder":
        kept.unlink()
        kept.mkdir()
    elif damage == "moved":
        with engine_of(other):
            pass
        (foreign,) = set(home.iterdir()) - {kept}
        kept.write_bytes(foreign.read_bytes())
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        kept.write_bytes({"empty": b"", "cut": whole[:-1], "flipped": flipped, "foreign": b"PK\3\4" * 99}[damage])
    with engine_of(path) as engine:
        assert not is_from_kept(engine)
        assert answer(engine) == want
    if damage != "a folder":
        assert kept.read_bytes() == whole
        with engine_of(path) as engine:
            assert is_from_kept(engine)


def test_a_home_that_cannot_be_written_is_done_without(tmp_path, put, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "file"))
    path = write(put)
    for _ in range(2):
        with engine_of(path) as engine:
            assert not is_from_kept(engine)


def test_the_recipe_gives_the_checkpoints_digest(put):
    """Small tensors are taken whole, large ones by their ends."""
    path = put(mb.gguf(mb.metadata(), {**mb.filled(mb.shapes()), "blk.0.ffn_down.weight": large()}))
    with open_checkpoint(path) as checkpoint:
        before, head_bytes, pieces = checkpoint.digest_recipe()
        data = path.read_bytes()
        ranges = [(0, head_bytes), *pieces]
        found = hashlib.sha256(before + b"".join(data[a : a + n] for a, n in ranges)).hexdigest()
        assert found == checkpoint.digest()
        assert checkpoint.full_digest() != found


def large():
    return "f32", (mb.HEADS * mb.HEAD_DIM * 20, mb.WIDTH), bytes(4 * mb.HEADS * mb.HEAD_DIM * 20 * mb.WIDTH)


def test_a_folder_or_a_quantization_is_not_kept(home, put):
    path = write(put, name="model/model.gguf")
    with engine_of(path.parent):
        pass
    with engine_of(path, quantization="q8_0"):
        pass
    assert not home.exists()


def test_nothing_is_kept_of_an_engine_that_could_not_be_built(home, put, monkeypatch):
    monkeypatch.setattr(engine_module, "eos_ids", lambda plan, tokenizer: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine_of(write(put)):
        pass
    assert not home.exists()


def test_a_start_from_a_kept_plan_imports_nothing_that_it_does_not_need(home, put):
    """Each of these takes 5 to 60 ms, a tenth and more of the whole start."""
    path = write(put)
    heavy = (
        "numpy",
        "asyncio",
        "rich",
        "jinja2",
        "huggingface_hub",
        "starlette",
        "tomllib",
        "tempfile",
        "http",
        "tqdm",
    )
    ours = ("tiercel.models.registry", "tiercel.ops.recorder", "tiercel.ops.lower", "tiercel.loaders.gguf_file")
    script = (
        "import sys\n"
        "from tiercel.cli.main import main\n"
        "from tiercel.llm.llm import LLM\n"
        "from tiercel.protocol.params import SamplingParams\n"
        f"engine = LLM({str(path)!r}, threads=1, max_num_seqs=2, skip_tokenizer_init=True)\n"
        f"params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)\n"
        f"[(_, output)] = engine.client.generate_many([{PROMPT}], params)\n"
        "engine.close()\n"
        "print(len(output.outputs[0].token_ids))\n"
        f"print([name for name in {heavy + ours} if name in sys.modules])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
        for _ in range(2)
    ]
    assert [one.stdout.split("\n")[0] for one in said] == ["2", "2"]
    assert "tiercel.ops.recorder" in said[0].stdout
    assert said[1].stdout.split("\n")[1] == "[]"
