import pytest
import torch

from tinygpt.precision import Policy, choose_device, choose_policy
from tinygpt.support import UserError


class FakeCuda:
    "Makes torch say that it has GPUs, with bfloat16 or without."

    def __init__(self, monkeypatch, bf16):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a pretend GPU")
        # emulation makes the default answer yes on every GPU: only the strict question counts
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
        monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: setattr(self, "matmul", how))


@pytest.mark.parametrize(
    "bf16, asked, dtype, scaler, matmul",
    [(True, "auto", torch.bfloat16, False, "high"), (False, "auto", torch.float16, True, "high"),
     (True, "float16", torch.float16, True, "high"), (True, "float32", torch.float32, False, "highest")],
)  # fmt: skip
def test_a_gpu_gets_the_format_that_its_hardware_has(monkeypatch, bf16, asked, dtype, scaler, matmul):
    fake = FakeCuda(monkeypatch, bf16)
    policy = choose_policy("auto", asked)
    assert (policy.device.type, policy.dtype, policy.scaler, fake.matmul) == ("cuda", dtype, scaler, matmul)


def test_bfloat16_is_refused_on_a_gpu_that_only_emulates_it(monkeypatch):
    FakeCuda(monkeypatch, bf16=False)
    with pytest.raises(UserError, match="bfloat16"):
        choose_policy("cuda", "bfloat16")


def test_a_cpu_gets_float32_and_mps_too(monkeypatch):
    assert choose_policy("cpu").dtype == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    policy = choose_policy()
    assert (policy.device.type, policy.dtype) == ("mps", torch.float32)


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_the_products_run_in_the_format_of_the_policy(asked):
    policy = choose_policy("cpu", asked)
    w = torch.ones(4, 4, requires_grad=True)
    with policy.autocast():
        product = torch.ones(4, 4) @ w
    assert product.dtype == policy.dtype == getattr(torch, asked)
    product.float().sum().backward()
    assert w.grad.dtype == torch.float32


@pytest.mark.parametrize("device, dtype, words", [
    ("tpu", "auto", "tpu"), ("cuda:99", "auto", "cuda:99"), ("cpu", "float16", "float16"), ("cpu", "int8", "int8"), ("", "auto", "device = "),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence_that_names_it(device, dtype, words):
    with pytest.raises(UserError, match=words):
        choose_policy(device, dtype)


def test_the_reason_is_part_of_the_printed_policy():
    assert "asked for" in str(choose_policy("cpu")) and "float32" in str(choose_policy("cpu"))
    assert "loss scaler" in str(Policy(torch.device("cpu"), torch.float16, "why", scaler=True))


def test_a_device_may_carry_an_index_and_autocast_still_works():
    device, _ = choose_device("cpu:0")
    assert Policy(device, torch.bfloat16, "").autocast().device == "cpu"
