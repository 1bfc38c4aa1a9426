"""The Triton kernels against the naive version in float64: on a GPU, or in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from tinygpt import attention_triton
from tinygpt.attention import attention
from tinygpt.attention_triton import triton_attention, triton_problem
from tinygpt.support import UserError, peak_bytes

#        T, S, n_head, n_kv_head, head_dim, causal, window
SHAPES = [
    (1, 1, 1, 1, 16, True, None),
    (70, 70, 2, 2, 16, True, None),
    (64, 64, 2, 1, 32, True, None),
    (70, 70, 2, 2, 16, False, None),
    (33, 70, 4, 2, 20, False, None),  # a head_dim that is no power of two
    (5, 70, 4, 1, 16, True, None),
    (1, 70, 4, 2, 8, True, None),
    # the last key that a block of queries sees stands at the start of the next block
    (64, 129, 1, 1, 16, True, None),
    (70, 33, 2, 1, 16, True, None),  # the first 37 queries see nothing
    (70, 70, 4, 2, 16, True, 9),
    (40, 100, 2, 1, 16, True, 33),
    (100, 40, 2, 2, 16, True, 5),
    (70, 70, 1, 1, 16, True, 1),
    # the last query that sees a block of keys stands at the start of the next block
    (70, 70, 1, 1, 16, True, 2),
]


def where_the_kernels_run():
    "cuda, cpu with the interpreter, or a skip with the reason."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if problem := triton_problem(device):
        pytest.skip(problem)
    return device


def qkv(device, T, S, n_head, n_kv_head, dim, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    sizes = [(2, n_head, T, dim), (2, n_kv_head, S, dim), (2, n_kv_head, S, dim)]
    return [torch.randn(size, generator=g).to(device, dtype).requires_grad_() for size in sizes]


def check_against_float64(device, shape, dtype, tolerance):
    *sizes, causal, window = shape
    inputs = qkv(device, *sizes, dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    results = []
    for impl, tensors in (("triton", inputs), ("naive", exact)):
        y = attention(*tensors, causal=causal, window=window, impl=impl)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
        results.append([y.detach(), *torch.autograd.grad(y, tensors, dy)])
    for name, ours, theirs in zip(("y", "dq", "dk", "dv"), *results, strict=True):
        assert ours.dtype == dtype
        bound = dict(atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(ours.double(), theirs, **bound, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_the_naive_version_in_float64(shape):
    tolerance = 1e-4 if torch.cuda.is_available() else 1e-5
    check_against_float64(where_the_kernels_run(), shape, torch.float32, tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_added_up_in_float32(dtype):
    shape = (70, 70, 2, 1, 16, True, None)
    check_against_float64(where_the_kernels_run(), shape, dtype, 16 * torch.finfo(dtype).eps)


def test_queries_that_see_nothing_give_zero_and_pass_no_gradient():
    q, k, v = qkv(where_the_kernels_run(), 70, 33, 2, 1, 16)
    y = triton_attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert (y[:, :, :37] == 0).all() and (dq[:, :, :37] == 0).all()
    assert all(t.isfinite().all() for t in (y, dq, dk, dv))


def test_it_keeps_the_inputs_the_output_and_one_number_per_query_and_head():
    q, k, v = qkv(where_the_kernels_run(), 70, 70, 4, 2, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = triton_attention(q, k, v)
    assert [t.data_ptr() for t in kept[:4]] == [t.data_ptr() for t in (q, k, v, y)]
    assert [tuple(t.shape) for t in kept[4:]] == [(2, 4, 70)]


def test_views_that_are_not_contiguous_give_the_same_numbers():
    q, k, v = qkv(where_the_kernels_run(), 40, 40, 2, 2, 16)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert not turned[0].is_contiguous()
    torch.testing.assert_close(triton_attention(*turned), triton_attention(q, k, v), atol=0, rtol=0)


def test_dropout_and_float64_are_refused_in_one_sentence():
    inputs = qkv(where_the_kernels_run(), 4, 4, 2, 2, 16)
    with pytest.raises(UserError, match="dropout = 0.1"):
        attention(*inputs, dropout=0.1, impl="triton")
    with pytest.raises(UserError, match="float64"):
        attention(*(t.double() for t in inputs), impl="triton")


def test_autocast_leaves_float64_alone_and_it_is_refused():
    device = where_the_kernels_run()
    inputs = [t.double() for t in qkv(device, 4, 4, 2, 2, 16)]
    with torch.autocast(device, torch.bfloat16), pytest.raises(UserError, match="float64"):
        attention(*inputs, impl="triton")


def test_without_triton_the_sentence_names_the_package_and_the_other_implementations(monkeypatch):
    monkeypatch.setattr(attention_triton, "triton", None)
    with pytest.raises(UserError, match="pip install triton.*'fused' or 'tiled'"):
        attention(*qkv("cpu", 4, 4, 2, 2, 16), impl="triton")


def test_on_a_cpu_without_the_interpreter_the_sentence_says_so():
    code = "import tinygpt.attention_triton as a; print(a.triton_problem('cpu'))"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "pip install triton" in said or "TRITON_INTERPRET=1" in said


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tinygpt import attention_triton as module

cases = [("bf16", 2, 64, 80, 163), ("fp32", 4, 256, 86, 99), ("fp16", 2, 256, 90, 227)]
for kind, itemsize, dim, capability, room in cases:
    tile = module._tile_size(dim, itemsize)
    for kernel in (module._forward_kernel, module._dq_kernel, module._dkv_kernel):
        sizes = dict(CAUSAL=True, BM=tile, BN=tile, BD=dim)
        whole = dict.fromkeys("T S D H GROUP WINDOW".split(), "i32")
        numbers = dict(scale="fp32", LSE="*fp32", DELTA="*fp32", **whole)
        signature = {n: "constexpr" if n in sizes else numbers.get(n, "*" + kind) for n in kernel.arg_names}
        code = triton.compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", capability, 32))
        assert code.asm["cubin"] and code.metadata.shared < room * 1024, (kind, dim, code.metadata.shared)
"""


@pytest.mark.skipif(attention_triton.triton is None, reason="needs the package triton")
def test_the_kernels_compile_for_gpus_and_fit_their_fast_memory_also_where_there_is_none(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_the_kernels_run_on_the_gpu_of_their_tensors_not_on_the_current_one():
    where_the_kernels_run()
    check_against_float64("cuda:1", (70, 70, 4, 2, 16, True, None), torch.float32, 1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_memory_grows_with_the_length_and_not_its_square_on_cuda():
    device = where_the_kernels_run()

    def peak(T):
        q, k, v = qkv(device, T, T, 8, 8, 64, torch.bfloat16)

        def run():
            triton_attention(q, k, v).sum().backward()

        run()
        return peak_bytes(run)

    assert peak(4096) / peak(2048) < 2.2
