"""1, 2, 3 and 4 processes are started once each and do everything; the tests look at what came back."""

import copy
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tinygpt.accumulate import accumulate_gradients, clip_gradients
from tinygpt.ddp.world import World, run_processes
from tinygpt.ddp.wrap import (
    AfterBackward,
    Bucketed,
    CountCollectives,
    Overlapped,
    claim_gradients,
    no_sync,
    release_gradients,
    settle_buckets,
    show_collectives,
    train_several,
    train_together,
    wrap_ddp,
    wrap_fsdp,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError, peak_bytes

CONFIG = dict(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32)
LLAMA = CONFIG | dict(position="rope", norm="rmsnorm", mlp="swiglu", bias=False, tie_weights=False)
DEEP = CONFIG | dict(n_layer=6, n_embd=128)
OURS = {
    "after": AfterBackward,
    "overlapped": Overlapped,
    "buckets": partial(Bucketed, bucket_mb=0.004),
    "one bucket": Bucketed,
}
ALL = {**OURS, "torch": lambda model: wrap_ddp(model, World(), find_unused_parameters=True)}
EXACT = dict(atol=1e-12, rtol=0)


class Odd(nn.Module):
    """Layers of unequal size, a tied head, a scalar, a buffer.

    One layer is frozen, one is used by some rows only, one by nobody.
    """

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.wide, self.back = nn.Linear(5, 300), nn.Linear(300, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("shift", torch.rand(5))

    def forward(self, x, y, reduction="mean"):  # rows that begin with token 6 use `sometimes`
        h = self.emb(x) + self.shift
        h = h + self.scale * self.frozen(self.back(torch.tanh(self.wide(h))))
        use = (x[:, :1] == 6).unsqueeze(-1)
        if use.any():
            h = h + use * self.sometimes(h)
        logits = F.linear(h, self.emb.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)


def odd_batch(seed, special_rows):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randint(6, (12, 4), generator=g), torch.randint(7, (12, 4), generator=g)
    x[special_rows, 0] = 6
    return x, y


def gradients(model):
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def against_the_whole_batch(world, wrap):
    "For four kinds of steps: this rank's gradients, one process's on the whole batch, calls and bytes."
    torch.manual_seed(world.rank)
    start = Odd().double()
    model = wrap(copy.deepcopy(start))
    alone = copy.deepcopy(model.module)
    found = {"start": start.state_dict(), "wrapped": copy.deepcopy(model.module.state_dict())}
    # the last rows belong to the last rank; "nobody": no rank uses `sometimes`
    kinds = {"step": ([10, 11], None), "nobody": ([], None), "micro": ([11], 1), "clip": ([0, 5], 2)}
    for name, (special, micro) in kinds.items():
        model.zero_grad()
        alone.zero_grad()
        x, y = odd_batch(len(name), special)
        mine = x.chunk(world.world_size)[world.rank]
        yours = y.chunk(world.world_size)[world.rank]
        share = y.numel() / world.world_size
        with CountCollectives() as count:
            accumulate_gradients(model, mine, yours, micro, share, no_sync=partial(no_sync, model))
        accumulate_gradients(alone, x, y, None)
        norms = [0, 0]
        if name == "clip":
            norms = [clip_gradients(m.parameters(), 0.01).item() for m in (model, alone)]
        found[name] = dict(
            ours=gradients(model),
            whole=gradients(alone),
            norms=norms,
            calls=count.calls["allreduce"],
            bytes=count.bytes["allreduce"],
        )
    with torch.no_grad(), CountCollectives() as count:
        model(x, y)
    found["calls without gradient"] = dict(count.calls)
    found["timeline"] = getattr(model, "timeline", None)
    return found


def resumed(world, settle):
    "Largest difference between the weights after four steps, and after two and two with a new DDP."

    def begin(state=None):
        torch.manual_seed(3)
        model = GPT(GPTConfig(**CONFIG, dropout=0.1))
        if state:
            model.load_state_dict(state["model"])
        ddp = wrap_ddp(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if state:
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        if settle:
            row = torch.zeros(1, 16, dtype=torch.int64)
            settle_buckets(ddp, row, row)
        return ddp, optimizer

    def steps(ddp, optimizer, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            batch = torch.randint(64, (12, 17), generator=generator)
            rows = batch.chunk(world.world_size)[world.rank]
            optimizer.zero_grad()
            accumulate_gradients(ddp, rows[:, :-1], rows[:, 1:], 2, no_sync=partial(no_sync, ddp))
            optimizer.step()
        return {
            "model": copy.deepcopy(ddp.module.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "rng": torch.get_rng_state(),
        }

    straight = steps(*begin(), range(4))["model"]
    again = steps(*begin(steps(*begin(), range(2))), range(2, 4))["model"]
    return max((straight[name] - again[name]).abs().max().item() for name in straight)


def held_by_a_forward(world, dtype):
    "Peak bytes of a forward under autocast, which keeps what its backward needs."
    model = wrap_fsdp(GPT(GPTConfig(**DEEP)), world, dtype)
    x = torch.randint(64, (1, 16))
    losses = []

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(x, x)[1])

    forward()
    losses.pop().backward()
    return peak_bytes(forward)


def everything(world):
    found = {name: against_the_whole_batch(world, wrap) for name, wrap in ALL.items()}
    found["collectives"] = show_collectives(world)
    if world.world_size > 1:
        for how in ("ddp", "fsdp"):
            found[f"8 {how}"] = train_together(world, how, CONFIG, steps=8, micro_batch_size=2)
        found["ddp 64"] = train_together(world, "ddp", CONFIG, dtype=torch.float64, micro_batch_size=2)
        found["fsdp 64"] = train_together(world, "fsdp", CONFIG, dtype=torch.float64, micro_batch_size=2)
        for name, config in (("gpt2", CONFIG), ("llama", LLAMA)):
            for how in ("fsdp", "fsdp bf16"):
                run = dict(steps=4, micro_batch_size=2, autocast=True)
                found[f"{name}, {how}"] = train_together(world, how, config, **run)
    if world.world_size == 2:
        for wrap in ("after", "overlapped", "buckets"):
            found[f"timeline {wrap}"] = train_together(world, wrap, CONFIG, steps=1)
        found["held"] = [held_by_a_forward(world, dtype) for dtype in (None, torch.bfloat16)]
        for sync in ("last", "every", "flag"):
            found[sync] = train_together(world, "ddp", CONFIG, micro_batch_size=2, sync=sync)
    if world.world_size == 3:
        found["resumed"] = [resumed(world, settle) for settle in (True, False)]
    return found


class OnDemand(dict):
    "What n processes found; they run when a test asks for them first."

    def __missing__(self, n):
        self[n] = run_processes(everything, n, timeout=1000)
        return self[n]


@pytest.fixture(scope="module")
def results():
    return OnDemand()


@pytest.fixture(scope="module")
def alone():
    "One process on the whole batch."
    return {
        "8": train_together(World(), "alone", CONFIG, steps=8),
        "64": train_together(World(), "alone", CONFIG, dtype=torch.float64),
    }


class Weights(nn.Module):
    "The first weight has the gradient -6. The second has one on the other rank only, the third on none."

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.zeros(n)) for n in (1, 2, 3))

    def forward(self):
        return -6 * self.w1.sum()


class Work:
    def __init__(self, finish):
        self.finish = finish

    def wait(self):
        self.finish()


def with_another_rank(monkeypatch, wrap):
    """This rank's gradients after a step together with one other rank, which is only played.

    It brings -8 for the first weight and 4 for the second. A message comes when somebody waits for it.
    """
    gradients = [torch.zeros(3), torch.full((2,), 4.0), torch.full((1,), -8.0)]  # as backward comes to them
    brings = {3: gradients[0], 2: gradients[1], 1: gradients[2], 6: torch.cat(gradients)}  # by the size
    ops = dist.ReduceOp

    def all_reduce(tensor, op=ops.SUM, async_op=False):
        def finish():
            if op == ops.MAX:  # has the other a gradient?
                tensor.copy_(torch.maximum(tensor, torch.tensor([0, 1, 1], dtype=tensor.dtype)))
            else:
                tensor.add_(brings[tensor.numel()].view_as(tensor)).div_(2 if op == ops.AVG else 1)

        if async_op:
            return Work(finish)
        finish()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, root: None)
    model = wrap(Weights())
    model().backward()
    return [w.grad if w.grad is None else w.grad.tolist() for w in model.module.parameters()]


@pytest.mark.parametrize("wrap", OURS)
def test_by_hand_the_means_of_two_ranks_where_one_lacks_a_gradient_and_both_lack_another(monkeypatch, wrap):
    first, second, third = with_another_rank(monkeypatch, OURS[wrap])
    assert first == [-7.0], f"the mean of -6 here and -8 there is -7, not {first}"
    assert second == [2.0, 2.0], f"without a gradient here and with 4 there the mean is 2, not {second}"
    assert third is None, f"where no rank has a gradient there is none, not {third}"


def test_a_gradient_is_averaged_by_one_until_it_is_let_go():
    params = list(nn.Linear(2, 2).parameters())
    claim_gradients(params, "Overlapped")
    fresh = nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match="Bucketed: Overlapped averages these gradients"):
        claim_gradients([fresh, *params], "Bucketed")
    claim_gradients([fresh], "Bucketed")  # what is refused claims nothing
    release_gradients(params)
    claim_gradients(params, "Bucketed")


def test_no_sync_of_a_plain_model_does_nothing():
    with no_sync(nn.Linear(2, 2)):
        pass


def one_on_cuda(world):
    "DDP and FSDP2 on this process's GPU, against the plain model."
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**CONFIG)).to("cuda")
    x = torch.randint(64, (4, 16), device="cuda")
    world = World(device=torch.device("cuda", 0))
    models = [copy.deepcopy(plain), wrap_ddp(copy.deepcopy(plain), world)]
    models.append(wrap_fsdp(copy.deepcopy(plain), world))
    found = []
    for model in models:
        accumulate_gradients(model, x, x, 2, no_sync=partial(no_sync, model))
        grads = [p.grad for p in model.parameters()]
        found.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])
    return [max((a - b).abs().max().item() for a, b in zip(found[0], other)) for other in found[1:]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_ddp_and_fsdp_have_the_gradients_of_the_plain_model(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert max(one_on_cuda(World())) < 1e-6
    finally:
        dist.destroy_process_group()


def test_fsdp_does_not_warn_of_the_logits_which_are_a_view_that_nobody_changes_in_place(recwarn):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = wrap_fsdp(GPT(GPTConfig(**DEEP)), World())
        row = torch.zeros((1, 4), dtype=torch.int64)
        model(row, row)[1].backward()
    finally:
        dist.destroy_process_group()
    assert not [str(warning.message) for warning in recwarn if "view" in str(warning.message)]


def test_a_bucket_holds_neighbors_of_one_type_up_to_its_size_and_a_larger_tensor_has_one_to_itself():
    sizes = [10, 10, 5, 5, 30, 1, 24]
    params = [torch.zeros(n) for n in sizes] + [torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    groups = Bucketed.group(SimpleNamespace(bucket_bytes=100), params)
    assert [[len(p) for p in group] for group in groups] == [[10, 10, 5], [5], [30], [1, 24], [2], [1]]
    assert [p is q for p, q in zip(params, sum(groups, []), strict=True)] == [True] * len(params)


def test_collectives_are_counted_one_by_one_with_their_bytes():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with CountCollectives() as count:
            for size in (3, 5, 8):
                dist.all_reduce(torch.zeros(size))
            dist.broadcast(torch.zeros(2, dtype=torch.float64), 0)
    finally:
        dist.destroy_process_group()
    assert count.calls == {"allreduce": 3, "broadcast": 1}
    assert count.bytes == {"allreduce": 64, "broadcast": 16}


@pytest.mark.parametrize("wrap", [AfterBackward, Overlapped, Bucketed])
def test_after_a_backward_that_raised_gradients_are_averaged_again(wrap):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        model = wrap(layers)

        def sent():
            "Messages of a backward."
            with CountCollectives() as count:
                model(torch.ones(1, 2)).sum().backward()
            return count.calls["allreduce"]

        usual = sent()
        breaks = layers[0].weight.register_hook(lambda grad: 1 / 0)  # the last layer's are here by then
        with pytest.raises(ZeroDivisionError):
            sent()
        breaks.remove()
        assert sent() == usual > 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [AfterBackward, Overlapped, Bucketed])
def test_a_wrapper_that_found_no_process_group_claims_nothing_so_another_try_works(wrap):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="process group"):
        wrap(layer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap(layer)
        with pytest.raises(UserError, match="already"):
            wrap(layer)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [AfterBackward, Overlapped, Bucketed])
def test_gradients_are_averaged_whatever_forward_returns_and_in_each_of_two_backwards(wrap):
    class Hidden(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(loss=super().forward(x).sum())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = wrap(Hidden(2, 2))

        def sent(*losses):
            with CountCollectives() as count:
                for loss in losses:
                    loss.backward()
            return count.calls["allreduce"]

        once = sent(model(torch.ones(1, 2)).loss)
        assert once > 1
        one, other = (model(torch.ones(1, 2)).loss for _ in range(2))
        assert sent(one, other) == 2 * once
        one, other = (model(torch.ones(1, 2)).loss for _ in range(2))
        assert sent(one + other) == once
        pending = model(torch.ones(1, 2)).loss
        with torch.no_grad(), model.no_sync():
            model(torch.ones(1, 2))  # decides nothing
        assert sent(pending) == once
        with model.no_sync():
            assert sent(model(torch.ones(1, 2)).loss) == 0
    finally:
        dist.destroy_process_group()


def test_no_sync_is_the_models_own_where_it_has_one_and_settling_leaves_nothing_behind():
    class Wrapped(GPT):
        inside = False

        @contextmanager
        def no_sync(self):
            self.inside = True
            yield
            self.inside = False

    model, x = Wrapped(GPTConfig(**CONFIG, dropout=0.2)), torch.zeros(2, 16, dtype=torch.int64)
    with no_sync(model):
        assert model.inside
    assert not model.inside
    before = torch.get_rng_state()
    settle_buckets(model, x, x)
    assert torch.equal(torch.get_rng_state(), before) and all(p.grad is None for p in model.parameters())


def test_several_runs_in_the_same_processes_are_the_runs_one_by_one():
    config = dict(vocab_size=20, block_size=8, n_layer=1, n_head=2, n_embd=8)
    runs = [dict(how="alone", steps=2), dict(how="alone", steps=3, rows=6)]
    together = train_several(World(), config, runs)
    for run, found in zip(runs, together, strict=True):
        assert found["losses"] == train_together(World(), config=config, **run)["losses"]
        assert len(found["losses"]) == run["steps"]


worlds = pytest.mark.parametrize("n", [1, 2, 3, 4])
wraps = pytest.mark.parametrize("wrap", ALL)


def difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.slow
@worlds
@wraps
@pytest.mark.parametrize("step", ["step", "nobody", "micro", "clip"])
def test_the_gradient_on_every_rank_is_that_of_one_process_on_the_whole_batch(results, n, wrap, step):
    for rank in range(n):
        found = results[n][rank][wrap][step]
        for name, whole in found["whole"].items():
            if whole is None:  # frozen, or used by no rank: the optimizer must leave it alone
                assert found["ours"][name] is None, name
            else:
                torch.testing.assert_close(found["ours"][name], whole, **EXACT)
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-12)
    without = {"frozen.weight", "frozen.bias", "never.weight", "never.bias"}
    if step == "nobody":
        without |= {"sometimes.weight", "sometimes.bias"}
    assert {name for name, g in found["ours"].items() if g is None} == without


@worlds
@wraps
def test_all_ranks_begin_with_the_weights_and_buffers_of_rank_0(results, n, wrap):
    for rank in range(n):
        for name, value in results[n][0][wrap]["start"].items():
            not_sent = wrap == "torch" and name == "shift"
            assert torch.equal(results[n][rank][wrap]["wrapped"][name], value) or not_sent, name
    if n > 1:
        one, other = (results[n][rank][wrap]["start"]["emb.weight"] for rank in (0, 1))
        assert not torch.equal(one, other)


@worlds
def test_calls_and_bytes_are_those_that_were_promised(results, n):
    # the tied matrix once, the frozen layer not
    sizes = {"emb": 35, "wide": 1800, "back": 1500, "sometimes": 30, "scale": 1, "never": 12}
    total = 8 * sum(sizes.values())
    tensors = 1 + 2 + 1 + 2 + 1 + 2
    flags = 4 * tensors
    expected = {
        "after": (1 + tensors - 2, total - 8 * sizes["never"] + flags),
        "overlapped": (1 + tensors, total + flags),
        "one bucket": (2, total + flags),
    }
    for wrap, (calls, nbytes) in expected.items():
        for step in ("step", "micro", "clip"):  # one round a step, however many micro-steps
            found = results[n][0][wrap][step]
            assert (found["calls"], found["bytes"]) == (calls, nbytes), (wrap, step)
        last = results[n][0][wrap]["timeline"]
        assert last.count("gradients") + last.count("which") == calls == len(last) - 1
    assert 2 < results[n][0]["buckets"]["step"]["calls"] < 1 + tensors
    assert all(results[n][0][wrap]["calls without gradient"] == {} for wrap in OURS)


def test_gradients_travel_during_backward_only_where_they_are_overlapped(results):
    for wrap in ("after", "overlapped", "buckets"):
        timeline = results[2][0][f"timeline {wrap}"]["timeline"]
        assert (timeline[0] == "gradients") == (wrap != "after"), wrap


@worlds
def test_a_parameter_that_nobody_uses_stops_the_line_but_not_the_step(results, n):
    # `never` comes first in the line: the others wait for it until backward is over
    timeline = results[n][0]["overlapped"]["timeline"]
    assert timeline[0] == "backward ends" and "gradients" in timeline


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_eight_steps_have_the_losses_and_weights_of_one_process(results, alone, n, how):
    for rank in range(n):
        together = results[n][rank][f"8 {how}"]
        assert together["losses"] == pytest.approx(alone["8"]["losses"], abs=1e-5)
        assert difference(together["weights"], alone["8"]["weights"]) < 1e-4
        exact = results[n][rank][f"{how} 64"]
        assert difference(exact["weights"], alone["64"]["weights"]) < 1e-12
        assert difference(exact["grads"], alone["64"]["grads"]) < 1e-12
    assert alone["8"]["losses"][-1] < alone["8"]["losses"][0]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_fsdp_keeps_a_part_and_ddp_keeps_all(results, alone, n):
    for kind, total in alone["8"]["kept"].items():
        assert results[n][0]["8 ddp"]["kept"][kind] == total
        parts = [results[n][rank]["8 fsdp"]["kept"][kind] for rank in range(n)]
        assert sum(parts) == total and max(parts) < 1.2 * total / n


@pytest.mark.parametrize("name, config", [("gpt2", CONFIG), ("llama", LLAMA)])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_weights_that_travel_in_bfloat16_change_no_bit_of_a_run_under_autocast(results, n, name, config):
    one = train_together(World(), "alone", config, steps=4, micro_batch_size=2, autocast=True)
    exact = train_together(World(), "alone", config, steps=4)
    assert one["losses"] != exact["losses"], "autocast is on"
    for rank in range(n):
        long, short = (results[n][rank][f"{name}, {how}"] for how in ("fsdp", "fsdp bf16"))
        assert short["losses"] == long["losses"]
        for kind in ("weights", "grads"):
            assert difference(short[kind], long[kind]) == 0
            assert all(t.dtype == torch.float32 for t in short[kind].values())
        assert short["kept"] == long["kept"]
        assert short["losses"] == pytest.approx(one["losses"], abs=1e-3)  # 1e-4 seen
    gains = [t for name, t in short["weights"].items() if ".ln_" in name]
    assert gains and not any(torch.equal(t, t.bfloat16().float()) for t in gains), "they would show rounding"


def test_only_the_blocks_matrices_travel_in_bfloat16_and_gradients_do_not(results):
    for name in ("gpt2", "llama"):
        long, short = (results[2][0][f"{name}, {how}"] for how in ("fsdp", "fsdp bf16"))
        assert short["calls"] == long["calls"]
        linear = [t for key, t in short["weights"].items() if ".attn." in key or ".mlp." in key]
        saved = 3 * 2 * sum(2 * t.numel() for t in linear)  # 3 micro-steps, forward and backward
        assert long["bytes"]["allgather_base"] - short["bytes"]["allgather_base"] == saved
        assert short["bytes"]["reduce_scatter_base"] == 4 * sum(t.numel() for t in short["weights"].values())


def test_a_forward_keeps_no_rounded_copy_of_weights_that_come_rounded(results):
    "Else autocast keeps one of all blocks for the backward, and what is spread is there as a whole."
    blocks = sum(p.numel() for p in GPT(GPTConfig(**DEEP)).h.parameters())
    for rank in range(2):
        long, short = results[2][rank]["held"]
        assert long - short > 0.8 * 2 * blocks


def test_a_flag_that_is_set_between_forward_and_backward_lets_the_ranks_drift_apart(results, alone):
    right, wrong = results[2][0]["last"], results[2][0]["flag"]
    assert difference(right["weights"], results[2][1]["last"]["weights"]) == 0
    # each rank now trains a model of its own
    assert difference(wrong["weights"], results[2][1]["flag"]["weights"]) > 1e-3
    assert right["losses"] == pytest.approx(alone["8"]["losses"][:3], abs=1e-5)
    assert abs(wrong["losses"][2] - alone["8"]["losses"][2]) > 1e-4


def test_gradients_that_are_synced_in_every_micro_step_cost_a_call_each(results):
    right, wrong = results[2][0]["last"], results[2][0]["every"]
    assert wrong["calls"]["allreduce"] == 3 * right["calls"]["allreduce"]  # 6 rows a rank, 2 in a micro-step
    assert wrong["losses"] == pytest.approx(right["losses"], abs=1e-5)  # nothing else gives it away


def test_a_resumed_run_on_three_ranks_is_the_same_to_the_last_bit_once_the_buckets_are_settled(results):
    for rank in range(3):
        settled, not_settled = results[3][rank]["resumed"]
        assert settled == 0 < not_settled < 1e-3


@worlds
def test_reduce_scatter_and_all_gather_make_an_all_reduce(results, n):
    for rank in range(n):
        found = results[n][rank]["collectives"]
        total = torch.stack([10.0 * r + torch.arange(n) for r in range(n)]).sum(0)
        assert torch.equal(found["all-reduce"], total) and torch.equal(found["then all-gather"], total)
        assert found["reduce-scatter"].item() == total[rank]
