"""Traffic, graph breaks, recompilations, and a compiled model that never costs the run."""

import os
import subprocess
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn

import tinygpt.compile as module
from tinygpt.checkpoint import load_model, save_checkpoint
from tinygpt.compile import (
    CompiledModel,
    compile_error,
    compile_model,
    compile_problem,
    graph_report,
    memory_traffic,
    watch_compiles,
)
from tinygpt.generate.text import stream_text
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

TINY = dict(vocab_size=257, block_size=16, n_layer=1, n_head=2, n_embd=16)
KINDS = {"gpt2": GPTConfig.gpt2, "llama": GPTConfig.llama, "modern": GPTConfig.modern}
IDS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_compiled_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(kind="modern", **kw):
    torch.manual_seed(0)
    model = GPT(KINDS[kind](**TINY, **kw))
    for p in model.parameters():  # zero-initialized heads would hide differences
        nn.init.normal_(p, std=0.2)
    return model


def python(code, tmp_path, **env):
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=1000)


# counting


def test_traffic_counts_what_each_operation_reads_and_writes_and_views_are_free():
    a = torch.ones(10, 20)
    b = torch.ones(20, dtype=torch.float64)
    assert memory_traffic(lambda: a * 2)[0] == 2 * a.nbytes
    assert memory_traffic(lambda: a + b)[0] == a.nbytes + b.nbytes + 2 * a.nbytes  # the sum is float64
    assert memory_traffic(lambda: torch.cat([a, a])) == (4 * a.nbytes, ["cat"])
    assert memory_traffic(lambda: a.view(20, 10).t()[1:]) == (0, [])
    assert memory_traffic(lambda: a.relu_())[0] == 2 * a.nbytes


def test_traffic_sees_the_backward_pass_too():
    w = torch.ones(8, requires_grad=True)
    forward = memory_traffic(lambda: w.sin().sum())[1]
    both = memory_traffic(lambda: w.sin().sum().backward())[1]
    assert both[: len(forward)] == forward and "cos" in both


# graph breaks and recompilations


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_one_graph(kind):
    report = graph_report(make(kind), IDS, IDS, reduction="sum")
    assert report.graphs == 1 and report.breaks == [] and report.ops > 20
    assert str(report).startswith("1 graph of")


def test_a_break_is_reported_with_its_line_and_its_reason():
    def f(x):
        y = x.sin()
        if y.sum() > 0:
            y = y + 1
        return y.cos()

    report = graph_report(f, torch.ones(3))
    assert report.graphs == 2 and len(report.breaks) == 1
    assert report.ops == 5, "sin, sum, >, + and cos: methods count too"
    assert "if y.sum() > 0" in report.breaks[0] and "tensor's value" in report.breaks[0]
    assert "break at line" in str(report)


def test_an_item_is_a_break_too():
    report = graph_report(lambda x: x * x.max().item() + 1, torch.ones(3))
    assert report.graphs == 2 and "item" in report.breaks[0]


def test_recompilations_are_listed_with_the_guard_that_failed():
    f = torch.compile(lambda x, k: x * k, backend="eager")
    with watch_compiles() as seen:
        for k in (3, 3, 4):
            f(torch.ones(2), k)
    assert [bool(c.reason) for c in seen] == [False, True]
    assert "k" in seen[1].reason and "3" in seen[1].reason
    assert all(c.seconds > 0 for c in seen)
    with watch_compiles() as seen:
        f(torch.ones(2), 3)
    assert seen == []


def test_a_recompilation_is_seen_also_after_very_many_compilations():
    for _ in range(70):  # torch remembers the last 64
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    with watch_compiles() as seen:
        torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert len(seen) == 1


def test_a_watch_ends_well_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), watch_compiles() as seen:
        1 / 0
    assert seen == []


# what cannot work


def test_a_device_without_support_is_said_in_a_line():
    assert "mps" in compile_problem(torch.device("mps"))


def test_a_python_that_is_too_new_is_said_in_a_line(monkeypatch):
    def refuse():
        raise RuntimeError("Python 3.99+ not yet supported for torch.compile\nmore")

    monkeypatch.setattr("torch._dynamo.eval_frame.check_if_dynamo_supported", refuse)
    assert compile_problem(torch.device("cpu")) == "Python 3.99+ not yet supported for torch.compile"


@pytest.mark.parametrize(
    "triton, has_cc, words", [(False, True, "Triton"), (True, False, "CC"), (True, True, "")]
)
def test_on_cuda_triton_and_a_c_compiler_are_asked_for(monkeypatch, triton, has_cc, words):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: triton)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/cc" if has_cc else None)
    problem = compile_problem(torch.device("cuda"))
    assert words in problem and bool(problem) == bool(words)


TRAIN = """
import torch
from tinygpt.compile import compile_model
model = torch.nn.Linear(4, 1)
call, message = compile_model(model, "on")
print(message)
for _ in range(2):
    call(torch.ones(2, 4)).sum().backward()
print("gradients", model.weight.grad.tolist())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is found otherwise there")
@pytest.mark.parametrize(
    "env", [{"CXX": "/nowhere/g++"}, {"PATH": "/nowhere", "CXX": "g++"}], ids=["CXX", "PATH"]
)
def test_without_a_compiler_there_is_one_clear_line_and_training_goes_on(tmp_path, env):
    done = python(TRAIN, tmp_path, **env)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2
    assert "no C++ compiler" in lines[0] and "install" in lines[0] and env["CXX"] in lines[0]
    assert lines[1] == "gradients [[4.0, 4.0, 4.0, 4.0]]" and "Traceback" not in done.stderr


BROKEN = """#!/bin/sh
[ "$1" = --version ] && echo "g++ 12.2.0" && exit 0
echo "/usr/bin/ld: cannot find -lcuda: No such file" >&2
exit 1
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script plays the compiler")
def test_a_compiler_that_fails_later_costs_a_line_and_not_the_run(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text(BROKEN)
    broken.chmod(0o755)
    done = python(TRAIN, tmp_path, CXX=str(broken))
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done.stdout + done.stderr
    assert "cannot find -lcuda" in lines[1] and "LIBRARY_PATH" in lines[1]
    assert lines[2].startswith("gradients [[4.0")


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "C++ compile error\n\nfoo.cpp:3: fatal error: Python.h: No such file",
            ["fatal error", "python3-dev"],
        ),
        ("/usr/bin/ld: cannot find -lcuda: No such file", ["-lcuda", "LIBRARY_PATH"]),
        (
            "Command '['gcc', '-lcuda']' returned non-zero exit status 1.",
            ["-lcuda", "is above", "LIBRARY_PATH", "python3-dev"],
        ),
        ("something odd\nin two lines", ["something odd"]),
        ("", ["RuntimeError"]),
    ],
)
def test_the_telling_line_of_a_compiler_error_is_found(text, words):
    said = compile_error(RuntimeError(text))
    assert all(word in said for word in words) and "\n" not in said


# the compiled model


def test_modes(monkeypatch):
    model = make()
    assert compile_model(model, "off") == (model, "not compiled: compile = off")
    with pytest.raises(UserError, match="maximum"):
        compile_model(model, "maximum")
    call, message = compile_model(model, "auto", tokens=1000)
    assert call is model and "not compiled" in message and "--compile on" in message
    work = 6 * sum(p.numel() for p in model.parameters())
    monkeypatch.setitem(module.COMPILE_FROM, "cpu", work * 1000)
    monkeypatch.setattr(module, "compile_problem", lambda device: "")
    for tokens, compiles in ((999, False), (1000, True), (None, True)):
        assert isinstance(compile_model(model, "auto", tokens)[0], CompiledModel) == compiles
    dropping = torch.nn.ModuleList([make(dropout=0.1)])  # inside a wrapper, as for several processes
    assert compile_model(dropping, "auto") == (
        dropping,
        "not compiled: with dropout a CPU gains little from it (--compile on does it all the same)",
    )
    assert isinstance(compile_model(dropping, "on")[0], CompiledModel)
    monkeypatch.delitem(module.COMPILE_FROM, "cpu")
    assert compile_model(model, "auto")[0] is model, "a device without a threshold is never chosen"
    monkeypatch.setattr(module, "compile_problem", lambda device: "of the moon")
    assert compile_model(model, "on") == (model, "not compiled: of the moon")


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_plain_models(kind):
    model = make(kind)
    call, message = compile_model(model, "on", backend="aot_eager")
    assert message.startswith("compiled")
    grads = []
    for fn in (call, model):
        model.zero_grad()
        loss = fn(IDS, IDS, reduction="sum")[1]
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_the_compiled_backward_is_given_the_gradient_of_the_loss_and_none_of_the_logits():
    "Autograd would make it of zeros, as large as the logits, and the compiled code would add it."
    from torch._dynamo.backends.common import aot_autograd

    given = []

    def backward(graph, inputs):
        given.extend(n.name for n in graph.graph.nodes if n.name.startswith("tangents"))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward)
    call, _ = compile_model(make(), "on", backend=backend)
    logits, loss = call(IDS, IDS, reduction="sum")
    loss.backward()
    assert given == ["tangents_1"] and logits is None


def test_train_compiled_then_sample_save_and_load_into_a_plain_model(tmp_path):
    model = make()
    tokenizer = ByteTokenizer()
    call, _ = compile_model(model, "on", backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = call(IDS, IDS)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with watch_compiles() as seen:
        text = "".join(stream_text(model, tokenizer, "a", 5, seed=1))
        model.eval()
        with torch.no_grad():
            after = model(IDS[:1, :7], IDS[:1, :7])[1]
        model.train()
        call(IDS, IDS)
    assert seen == [], "sampling and evaluating do not touch what is compiled"
    save_checkpoint(tmp_path / "step", model, tokenizer)
    loaded, _, _ = load_model(tmp_path / "step")
    assert not any("_orig_mod" in name for name in [*loaded.state_dict(), *model.state_dict()])
    assert torch.equal(loaded(IDS[:1, :7], IDS[:1, :7])[1], after)
    assert "".join(stream_text(loaded, tokenizer, "a", 5, seed=1)) == text


def test_what_is_trained_with_is_no_module_and_so_cannot_be_saved_by_mistake():
    call, _ = compile_model(make(), "on", backend="eager")
    assert not isinstance(call, nn.Module) and not hasattr(call, "state_dict")


def test_train_and_eval_mode_reach_the_compiled_code():
    model = make(dropout=0.5)
    call, _ = compile_model(model, "on", backend="eager")

    def run():
        return call(IDS, IDS)[1].item()

    assert run() != run(), "dropout is on"
    model.eval()
    assert run() == run()
    model.train()
    assert run() != run()


def test_an_error_of_the_model_itself_passes_and_nothing_is_given_up():
    said = []
    call, _ = compile_model(make(), "on", backend="eager", say=said.append)
    call(IDS, IDS)
    with pytest.raises(UserError, match="block_size"):
        call(torch.zeros(1, 17, dtype=torch.long))
    assert said == [] and call.compiled is not None


def test_when_the_backend_fails_it_is_said_once_and_the_plain_model_goes_on():
    def fails(graph, inputs):
        raise OSError("No space left on device")

    said = []
    model = make()
    call, _ = compile_model(model, "on", backend=fails, say=said.append)
    for _ in range(3):
        assert call(IDS, IDS)[1] == model(IDS, IDS)[1]
    assert len(said) == 1 and "No space left" in said[0] and "TORCHINDUCTOR_CACHE_DIR" in said[0]


def test_importing_the_module_does_not_import_the_compiler():
    code = """
import sys, tinygpt.compile
print([m for m in ("torch._inductor", "torch._dynamo", "matplotlib") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


INDUCTOR = """
import torch
from tinygpt.compile import compile_model
from tinygpt.model import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig.modern(vocab_size=60, block_size=8, n_layer=1, n_head=2, n_embd=16))
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.2)
ids = torch.randint(60, (2, 8))
call, message = compile_model(model, "on")
print(message)
losses = []
for fn in (call, model):
    model.zero_grad()
    loss = fn(ids, ids, reduction="sum")[1]
    loss.backward()
    losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(compile_problem(torch.device("cpu"))), reason=compile_problem(torch.device("cpu")))
def test_with_a_real_compiler_a_step_is_the_plain_models_up_to_rounding(tmp_path):
    # torch compiles for each instruction set that this CPU has a program to see whether its compiler can
    done = python(INDUCTOR, tmp_path, TORCHINDUCTOR_VEC_ISA_OK="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("compiled") and done.stdout.splitlines()[1:] == ["equal"]
