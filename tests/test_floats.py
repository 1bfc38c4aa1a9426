"Number formats against torch's own dtypes, numpy, exact fractions and bit masks."

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.floats import (
    BF16,
    FORMATS,
    FP4_E2M1,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    FloatFormat,
    bit_string,
    decode,
    encode,
    format_table,
    round_to,
    stochastic_round_to,
    ulp,
)
from tinygpt.support import UserError

# those with a dtype of torch's to compare with, and few enough patterns to try them all
SHORT = [FP16, BF16, FP8_E4M3, FP8_E5M2]
WITH_DTYPE = [FP64, FP32, *SHORT]
INTEGER = {64: torch.int64, 32: torch.int32, 16: torch.int16, 8: torch.uint8}
by_name = dict(argvalues=SHORT, ids=lambda f: f.name)
VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def same(a, b):
    "Equal values, the same sign of zero, NaN in the same places."
    assert a.shape == b.shape
    a, b = a.double(), b.double()
    ok = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    assert ok.all(), f"{(~ok).sum()} of {ok.numel()} differ: {a[~ok][:5].tolist()} and {b[~ok][:5].tolist()}"


def all_codes(fmt):
    return torch.arange(2**fmt.bits)


def torch_decode(codes, fmt):
    "What torch makes of the bit patterns."
    return codes.to(INTEGER[fmt.bits]).view(fmt.dtype)


def hard_float32(fmt):
    """A million random float32 bit patterns, and what is hard about `fmt`.

    That is every number of it, every midpoint, and the float32 neighbors of both.
    """
    codes = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator())
    patterns = codes.to(torch.int32).view(torch.float32)
    exponents = torch.randint(-30, 12, (100_000,), generator=generator(2))
    ordinary = torch.randn(100_000, generator=generator(1)) * torch.exp2(exponents)

    # the numbers, and the ties between them; beyond the last one a tie leads to infinity
    numbers = torch_decode(all_codes(fmt), fmt).double()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    last_tie = float(numbers[-1] + (numbers[-1] - numbers[-2]) / 2)
    edge = torch.tensor([fmt.max, last_tie], dtype=torch.float64)
    special = torch.cat([numbers, ties, edge, -edge]).float()
    up = torch.nextafter(special, torch.tensor(torch.inf))
    down = torch.nextafter(special, torch.tensor(-torch.inf))

    mantissas = torch.randint(0, 2**23, (100_000,), generator=generator(3))
    subnormal = mantissas.to(torch.int32).view(torch.float32)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4028234663852886e38])
    return torch.cat([patterns, ordinary, special, up, down, subnormal, -subnormal, odd])


def torch_saturates_e4m3():
    "float8_e4m3fn overflows to NaN in torch 2.11 and to 448 in 2.13; the change is of April 2026."
    does = bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float() == 448)
    assert VERSION not in {(2, 11), (2, 13)} or does == (VERSION == (2, 13)), (
        f"torch {torch.__version__} saturates: {does}"
    )
    return does


@pytest.mark.parametrize("fmt", **by_name)
def test_decode_agrees_with_torch_on_every_bit_pattern(fmt):
    same(decode(all_codes(fmt), fmt), torch_decode(all_codes(fmt), fmt))


@pytest.mark.parametrize("fmt", **by_name)
def test_decode_takes_the_signed_integers_that_view_gives(fmt):
    x = torch_decode(all_codes(fmt), fmt)
    same(decode(x.view(torch.int16 if fmt.bits == 16 else torch.int8), fmt), x)


@pytest.mark.parametrize("fmt", **by_name)
def test_encode_gives_every_bit_pattern_back(fmt):
    value = decode(all_codes(fmt), fmt)
    codes = encode(value, fmt)
    number = ~value.isnan()
    assert torch.equal(codes[number], all_codes(fmt)[number])
    assert torch_decode(codes[~number], fmt).double().isnan().all()


@pytest.mark.parametrize("fmt", [FP32, FP64], ids=lambda f: f.name)
def test_decode_and_encode_agree_with_the_bits_of_float32_and_float64(fmt):
    codes = torch.randint(-(2**63), 2**63 - 1, (300_000,), generator=generator()) >> (64 - fmt.bits)
    subnormal = torch.randint(0, 2**fmt.mantissa_bits, (1000,), generator=generator(1))
    infinity = fmt.max_code + 1
    minus_zero = -(2 ** (fmt.bits - 1))
    special = torch.tensor([0, 1, fmt.max_code, infinity, infinity + 1, minus_zero])
    codes = torch.cat([codes, subnormal, special])
    value = torch_decode(codes, fmt)
    same(decode(codes, fmt), value)
    number = ~value.isnan()
    again = encode(value, fmt)[number]
    assert torch.equal(torch_decode(again, fmt), value[number])
    assert torch.equal(again.to(INTEGER[fmt.bits]), codes[number].to(INTEGER[fmt.bits]))


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda f: f.name)
def test_the_limits_are_those_of_finfo(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.bits, fmt.max) == (info.bits, info.max)
    assert (fmt.smallest_normal, fmt.eps) == (info.smallest_normal, info.eps)
    assert fmt.smallest_subnormal == torch_decode(torch.tensor([1]), fmt).double().item()


@pytest.mark.parametrize("fmt", **by_name)
def test_rounding_agrees_with_torch_on_a_million_patterns_on_every_number_and_every_tie(fmt):
    x = hard_float32(fmt)
    saturate = fmt is FP8_E4M3 and torch_saturates_e4m3()
    theirs = x.to(fmt.dtype).float()
    same(round_to(x, fmt, saturate), theirs)
    same(decode(encode(x, fmt, saturate), fmt), theirs)


def test_e4m3_overflow_is_nan_or_448_as_one_chooses():
    x = torch.tensor([448.0, 464.0, 464.0001, 1e30, torch.inf, -465.0, -torch.inf, torch.nan])
    nan = torch.nan
    # 464 is halfway to 480: to even
    same(round_to(x, FP8_E4M3), torch.tensor([448, 448, nan, nan, nan, nan, nan, nan]))
    same(round_to(x, FP8_E4M3, saturate=True), torch.tensor([448, 448, 448, 448, 448, -448, -448, nan]))
    assert encode(x, FP8_E4M3)[2] == 0x7F and encode(x, FP8_E4M3, saturate=True)[2] == 0x7E


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_saturation_keeps_numbers_finite_and_changes_no_other(fmt):
    inside = torch.tensor([fmt.max, -fmt.max, 1.0, fmt.smallest_subnormal], dtype=torch.float64)
    same(round_to(inside, fmt, saturate=True), inside)
    same(round_to(inside, fmt), inside)
    beyond = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)
    same(round_to(beyond, fmt, saturate=True), inside[:2])
    if fmt.special == "ieee":
        same(round_to(beyond, fmt), beyond)


def test_tf32_is_float32_with_thirteen_bits_rounded_off():
    x = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator()).to(torch.int32)
    ties = (x & ~0x1FFF) | 0x1000
    x = torch.cat([x, ties, ties + 1, ties - 1])
    x = x[x.view(torch.float32).isfinite()].long() & 0xFFFFFFFF
    # a carry runs from the mantissa into the exponent, as it must
    masked = (x + 0xFFF + ((x >> 13) & 1)) & ~0x1FFF
    value = masked.to(torch.int32).view(torch.float32)
    same(round_to(x.to(torch.int32).view(torch.float32), TF32), value)
    assert torch.equal(encode(value, TF32), masked >> 13)
    same(decode(masked >> 13, TF32), value)


def test_float64_is_rounded_to_float32_as_torch_does():
    x = torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=generator()).view(torch.float64)
    exponents = torch.randint(-160, 130, (200_000,), generator=generator(2)).double()
    near = torch.randn(200_000, dtype=torch.float64, generator=generator(1)) * torch.exp2(exponents)
    x = torch.cat([x, near])
    same(round_to(x, FP32), x.float())
    same(decode(encode(x, FP32), FP32), x.float())
    same(round_to(x, FP64), x)


def test_float64_is_rounded_to_float16_once_as_numpy_does_and_not_by_way_of_float32():
    tie = 1 + 2**-11
    near = torch.tensor([tie, tie + 2**-40, tie - 2**-40], dtype=torch.float64)
    x = torch.cat([near, torch.randn(100_000, dtype=torch.float64, generator=generator())])
    with np.errstate(over="ignore"):
        same(round_to(x, FP16), torch.from_numpy(x.numpy().astype(np.float16)))
    assert round_to(tie + 2**-40, FP16) == 1 + 2**-10
    assert near[1].float().half() != 1 + 2**-10


def exact_numbers(fmt):
    """Value of each non-negative code, as a fraction, from the definition.

    The last is what the first code that is no number would be.
    """
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    for code in range(fmt.max_code + 2):
        exponent, mantissa = divmod(code, 2**fmt.mantissa_bits)
        lead = 2**fmt.mantissa_bits if exponent else 0
        yield Fraction(lead + mantissa) * Fraction(2) ** (max(exponent, 1) - bias - fmt.mantissa_bits)


shares = st.floats(-1.2, 1.2, allow_subnormal=False) | st.integers(-64, 64).map(lambda n: n / 64)


@settings(max_examples=150, deadline=None)
@given(
    exponent_bits=st.integers(2, 5),
    mantissa_bits=st.integers(1, 4),
    special=st.sampled_from(["ieee", "nan", "none"]),
    share=st.lists(shares, min_size=1, max_size=20),
)
def test_rounding_to_any_format_finds_the_nearest_number_by_brute_force(
    exponent_bits, mantissa_bits, special, share
):
    fmt = FloatFormat("any", exponent_bits, mantissa_bits, special)
    *numbers, one_more = exact_numbers(fmt)  # beyond halfway to one_more is overflow
    same(decode(torch.arange(len(numbers)), fmt), torch.tensor([float(n) for n in numbers]).double())
    beyond = {"ieee": np.inf, "nan": np.nan, "none": fmt.max}[special]
    for x in [s * fmt.max for s in share] + [s * fmt.smallest_normal for s in share]:
        size = abs(Fraction(x))
        distances = [(abs(size - n), code % 2, code) for code, n in enumerate([*numbers, one_more])]
        nearest = min(distances)[2]
        if nearest == len(numbers):
            loose = beyond
            tight = fmt.max
        else:
            loose = tight = float(numbers[nearest])
        same(round_to(x, fmt), torch.tensor(np.copysign(loose, x)))
        same(round_to(x, fmt, saturate=True), torch.tensor(np.copysign(tight, x)))


@pytest.mark.parametrize("fmt", **by_name)
def test_ulp_is_the_gap_to_the_next_bit_pattern(fmt):
    numbers = decode(torch.arange(fmt.max_code + 1), fmt)
    assert torch.equal(ulp(numbers[:-1], fmt), numbers.diff())
    assert torch.equal(ulp(-numbers, fmt), ulp(numbers, fmt))


def test_ulp_agrees_with_nextafter_for_float32_and_float64():
    for fmt in (FP32, FP64):
        codes = torch.randint(0, fmt.max_code, (100_000,), generator=generator())
        x = codes.to(INTEGER[fmt.bits]).view(fmt.dtype)
        gap = torch.nextafter(x, torch.tensor(torch.inf, dtype=fmt.dtype)).double() - x.double()
        assert torch.equal(ulp(x, fmt), gap)


def test_ulp_of_what_is_no_number_of_the_format_is_nan():
    assert ulp([torch.nan, torch.inf, 449.0], FP8_E4M3).isnan().all()
    assert ulp(448.0, FP8_E4M3) == 32 and ulp(0.0, FP8_E4M3) == FP8_E4M3.smallest_subnormal


@pytest.mark.parametrize("fmt", [TF32, FP16, BF16, FP8_E4M3, FP8_E5M2, FP4_E2M1], ids=lambda f: f.name)
def test_stochastic_rounding_is_unbiased(fmt):
    n = 20_000
    low = fmt.smallest_subnormal / 2
    high = min(fmt.max, 100.0) * 0.99
    values = low * (high / low) ** torch.rand(150, generator=generator(), dtype=torch.float64)
    values = values * torch.tensor([1.0, -1.0]).repeat(75)
    draws = stochastic_round_to(values.repeat(n, 1), fmt, generator(1))
    spacing = ulp(values, fmt)
    share = (values / spacing) % 1
    z = (draws.mean(0) - values) / (spacing * (share * (1 - share) / n).sqrt())
    assert z.abs().max() < 5 and (z**2).mean() < 1.6  # z is standard normal: mean square 1 ± 0.12
    below = (values / spacing).floor() * spacing
    assert ((draws == below) | (draws == below + spacing)).all()


@pytest.mark.parametrize("fmt", SHORT + [TF32], ids=lambda f: f.name)
def test_stochastic_rounding_leaves_the_numbers_of_the_format_alone(fmt):
    x = decode(torch.randint(0, 2**fmt.bits, (5000,), generator=generator()), fmt)
    same(stochastic_round_to(x, fmt, generator()), x)


def test_stochastic_rounding_follows_the_generator():
    x = torch.randn(1000, generator=generator())
    one, two, three = (stochastic_round_to(x, BF16, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, three)
    assert one.dtype == torch.float32 and torch.equal(one.bfloat16().float(), one)


def test_stochastic_rounding_near_the_largest_number_saturates_where_asked():
    x = torch.full((1000,), 460.0)
    loose = stochastic_round_to(x, FP8_E4M3, generator())
    tight = stochastic_round_to(x, FP8_E4M3, generator(), saturate=True)
    assert 0.3 < loose.isnan().float().mean() < 0.45  # 12 of 32 on the way to 480, which is not there
    assert (tight == 448).all()
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    same(stochastic_round_to(odd, FP16), odd)


def test_results_are_float32_for_short_tensors_and_float64_for_everything_else():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert round_to(torch.ones(2, dtype=dtype), BF16).dtype == torch.float32
    tensors = [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32)]
    for x in (1.5, [1.5], *tensors, np.ones(2, dtype=np.float32)):
        assert round_to(x, BF16).dtype == torch.float64
    wide = FloatFormat("wide", 11, 4)
    assert round_to(torch.tensor([3.4e38]), wide).isfinite().all()  # float32 could not hold 2**128


def test_any_shape_goes_in_and_comes_out():
    x = torch.randn(3, 4, 5, generator=generator())
    for part in (x, x.transpose(0, 2), x[:, ::2], x[0, 0, 0], x[:0]):
        rounded = round_to(part, FP16)
        same(rounded, part.half())
        same(decode(encode(part, FP16), FP16), rounded)
        assert stochastic_round_to(part, FP16).shape == ulp(part, FP16).shape == part.shape


def test_the_input_is_left_alone_and_no_gradient_flows():
    x = torch.randn(10, requires_grad=True, generator=generator())
    before = x.detach().clone()
    assert not round_to(x, BF16).requires_grad and not stochastic_round_to(x, BF16).requires_grad
    assert torch.equal(x, before)


def test_the_default_dtype_changes_nothing():
    x = torch.randn(1000, dtype=torch.float64, generator=generator())
    codes = torch.arange(2**52 - 1000, 2**52)

    def results():
        return [round_to(x, FP32), decode(codes, FP64), encode(x, BF16), round_to(0.1, FP64)]

    expected = results()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_bad_input_gets_one_sentence():
    for call, words in [
        (lambda: decode(torch.tensor([256]), FP8_E4M3), "8 bits"),
        (lambda: decode(torch.tensor([-129]), FP8_E4M3), "8 bits"),
        (lambda: decode(torch.tensor([1.0]), FP16), "integers"),
        (lambda: round_to(torch.tensor([1j]), FP16), "real numbers"),
        (lambda: encode(torch.tensor([True]), FP16), "real numbers"),
        (lambda: round_to(torch.tensor([2**53 + 1]), FP32), r"2\*\*53"),
        (lambda: round_to(torch.nan, FP4_E2M1), "fp4 e2m1 has none"),
        (lambda: FloatFormat("odd", 1, 3), "exponent_bits must be 2 to 11, not 1"),
        (lambda: FloatFormat("odd", 5, 60), "mantissa_bits 1 to 52, not 60"),
        (lambda: FloatFormat("odd", 5, 2, special="inf"), "special = 'inf'"),
        (lambda: FloatFormat("odd", 11, 5, special="nan"), "special must be 'ieee', not 'nan'"),
    ]:
        with pytest.raises(UserError, match=words):
            call()


def test_integers_of_every_size_are_refused_or_exact():
    assert round_to(torch.tensor([257, -3]), BF16).tolist() == [256, -3]
    for extreme in (torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max):
        with pytest.raises(UserError):
            round_to(torch.tensor([extreme]), FP64)


def test_bits_are_written_in_three_groups():
    assert bit_string(1.0, FP32) == "0 01111111 " + "0" * 23
    assert bit_string(-6.5, FP16) == "1 10001 1010000000"
    assert bit_string(-0.0, FP8_E4M3) == "1 0000 000" and bit_string(torch.nan, FP8_E4M3) == "0 1111 111"
    assert bit_string(-1.0, FP64) == "1 01111111111 " + "0" * 52


def test_the_table_has_a_row_for_each_format_and_its_numbers():
    lines = format_table().splitlines()
    assert len(lines) == 1 + len(FORMATS) and len({len(line) for line in lines}) == 1
    row = next(line for line in lines if line.startswith("fp16"))
    assert row.split() == ["fp16", "16", "5", "10", "6.55e+04", "6.1e-05", "5.96e-08", "0.000977", "3.3"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("fmt", **by_name)
def test_on_a_gpu_the_numbers_are_those_of_the_cpu(fmt):
    x = hard_float32(fmt)
    same(round_to(x.cuda(), fmt).cpu(), round_to(x, fmt))
    assert torch.equal(encode(x.cuda(), fmt).cpu(), encode(x, fmt))
    assert stochastic_round_to(x.cuda(), fmt, torch.Generator("cuda").manual_seed(0)).is_cuda
