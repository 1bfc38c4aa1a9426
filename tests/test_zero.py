"""Sharded optimizers against the single-process ones, on 1 to 4 processes.

The numbers of a 124 M model are counted without allocating it.
"""

import contextlib
import copy
import functools
import pickle
import socket
import struct
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinygpt.adamw import AdamW, adamw_groups, make_adamw
from tinygpt.ddp.world import World, init_world, run_processes
from tinygpt.ddp.wrap import AfterBackward, Bucketed, Overlapped, wrap_ddp
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import CombinedOptimizer, Muon, make_optimizer, muon_groups
from tinygpt.precision import LossScaler, unscale_gradients
from tinygpt.support import UserError
from tinygpt.zero import DistAdamW, DistMuon, ZeroOptimizer, make_zero
from tinygpt.zero_wire import Wire

# of all processes together, on a busy machine; run_processes ends each start after 240 s
pytestmark = pytest.mark.timeout(1200)


class Net(nn.Module):
    """Shapes that divide by nothing.

    A tied embedding, a fused matrix, a scalar, a tensor of three dimensions, a frozen and an empty parameter.
    """

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def tensor(*shape):
            return nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).mul(0.5).to(dtype))

        self.emb = tensor(11, 5)
        self.fused = tensor(9, 5)
        self.a = tensor(7, 9)
        self.b = tensor(7, 9)
        self.c = tensor(5, 7)
        self.scalar = tensor()
        self.odd = tensor(3, 1, 5)
        self.bias = tensor(7)
        self.empty = tensor(0, 3)
        self.frozen = nn.Parameter(tensor(5, 5).data, requires_grad=False)

    def forward(self, x, use_a=True, use_odd=True):
        h = self.emb[x] @ self.frozen
        h = torch.tanh(h @ self.fused.T)
        h = h @ self.b.T + (h * 0.7 @ self.a.T if use_a else 0) + self.bias
        h = torch.tanh(h) @ self.c.T * self.scalar
        return (h + self.odd.sum((0, 1)) if use_odd else h) @ self.emb.T  # tied


def groups(net):
    "(Muon's, AdamW's), an empty group among them."
    muon = [dict(params=[net.a, net.b, net.c]), dict(params=[net.fused], split=(4, 2, 3), lr=0.01)]
    adamw = [
        dict(params=[net.emb, net.odd, net.empty, net.frozen], weight_decay=0.1),
        dict(params=[]),
        dict(params=[net.scalar, net.bias], weight_decay=0.0),
    ]
    return muon, adamw


def single(net, kind):
    muon, adamw = groups(net)
    if kind == "adamw":
        return AdamW(muon_as_adamw(muon) + adamw, lr=0.01)
    return CombinedOptimizer(Muon(muon, lr=0.03), AdamW(adamw, lr=0.01))


def sharded(net, kind, **wire):
    muon, adamw = groups(net)
    wire = Wire(**wire)
    if kind == "adamw":  # several buckets, and tensors larger than one
        return DistAdamW(muon_as_adamw(muon) + adamw, lr=0.01, bucket_bytes=600, wire=wire)
    rest = DistAdamW(adamw, lr=0.01, bucket_bytes=200, wire=wire)
    return ZeroOptimizer(DistMuon(muon, lr=0.03, wire=wire), rest)


def muon_as_adamw(muon):
    return [dict(params=g["params"]) for g in muon]


def both_kinds(model, lr=0.02, adamw_lr=5e-3):
    "Groups of a GPT: Muon for the matrices of the blocks, AdamW for the rest."
    return muon_groups(model, adamw_groups(model, adamw_lr), lr)


def groups_for(kind, model, lr):
    return adamw_groups(model, lr) if kind == "adamw" else both_kinds(model, lr)


def losses(net, step, world_size, device="cpu"):
    """The micro-losses of each rank in this step, very unequal.

    Some leave parameters without gradient: `a` on rank 0 only, `odd` on all.
    """
    g = torch.Generator().manual_seed(step)
    dtype = net.emb.dtype
    x = torch.randint(11, (world_size, 2, 6), generator=g).to(device)
    y = torch.randint(11, (world_size, 2, 6), generator=g).to(device)

    def loss(r, m):
        out = net(x[r, m], use_a=r != 0 or step % 3 > 0, use_odd=step % 5 > 0)
        return F.cross_entropy(out, y[r, m]).to(dtype) * (1 + 5 * r)

    return [[functools.partial(loss, r, m) for m in range(2)] for r in range(world_size)]


def train(world, kind, dtype, steps=30, native=None, device="cpu"):
    """The largest difference of weights and norms between sharded and single-process training over all steps.

    After 30 steps, what is accumulated how and which parameters have no gradient begins anew.
    """
    # another seed on each rank: rank 0's weights must win
    ours = Net(seed=world.rank, dtype=dtype).to(device)
    alone = Net(dtype=dtype).to(device)
    ours.frozen.data.copy_(alone.frozen)
    optimizer, reference = sharded(ours, kind, native=native), single(alone, kind)
    worst = 0.0
    for step in range(steps):
        for o in (optimizer, reference):
            for group, lr in zip(o.param_groups, (0.03, 0.01, 0.02, 0.02, 0.02)):
                group["lr"] = lr * (1 - step / 60)  # a schedule goes through the groups
        first, last = losses(ours, step, world.world_size, device)[world.rank]
        with optimizer.no_sync() if step % 2 else contextlib.nullcontext():
            first().backward()
        if step % 2 == 0:
            optimizer.finish()  # the other way to accumulate: parts, after each micro-step
        last().backward()
        if step % 2 == 0:
            optimizer.finish()
        for rank_losses in losses(alone, step, world.world_size, device):
            for loss in rank_losses:
                (loss() / world.world_size).backward()
        norm = optimizer.clip_gradients(0.7)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.7)
        assert norm.dim() == 0 and all(p.grad is None for p in ours.parameters())
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for p, q in [(norm, expected), *zip(ours.parameters(), alone.parameters())]:
            if p.numel():
                worst = max(worst, ((p - q).abs() / q.abs().clamp(min=1)).max().item())
    return worst


# ---- what runs in the processes; one start of them does many checks ------------------------------


def chained(world, kind, state, weights, steps=4):
    """Go on from the state of another number of ranks.

    All ranks have equal gradients of whole numbers: their mean is exact, so every bit must agree.
    """
    net, alone = Net(seed=1), Net()
    with torch.no_grad():
        for p, q in zip(net.parameters(), weights):
            p.copy_(q)
        for p, q in zip(alone.parameters(), weights):
            p.copy_(q)
    optimizer, reference = sharded(net, kind), single(alone, kind)
    if state:
        optimizer.load_state_dict(copy.deepcopy(state))
        reference.load_state_dict(copy.deepcopy(state))
    g = torch.Generator().manual_seed(7)
    for step in range(steps):
        for model, o in ((net, optimizer), (alone, reference)):
            g.manual_seed(step)
            total = 0
            for name, p in model.named_parameters():
                value = torch.randint(-4, 5, p.shape, generator=g).to(p)
                if p.requires_grad and not (name == "odd" and step % 2):
                    total = total + (p * value).sum()
            total.backward()
            o.step()
            o.zero_grad()
    differ = [n for (n, p), q in zip(net.named_parameters(), alone.parameters()) if not torch.equal(p, q)]
    return (
        optimizer.state_dict(),
        [p.detach().clone() for p in net.parameters()],
        differ,
        same_state(optimizer.state_dict(everywhere=True), reference.state_dict()),
    )


def same_state(ours, theirs):
    "Keys and tensors of a state dict, bit for bit; the step counts as numbers."
    for i, entry in theirs["state"].items():
        for key, value in entry.items():
            mine = ours["state"][i][key]
            if key == "step":
                if int(mine) != int(value):
                    return f"{i} {key}"
            elif not (mine.device.type == "cpu" and torch.equal(mine, value)):
                return f"{i} {key}"
    return "" if set(ours["state"]) == set(theirs["state"]) else "other parameters"


def overflow(world):
    "A step whose gradients overflow on the last rank only: unscaled by hand, then by the LossScaler."

    def reduce(t):
        if world.world_size > 1:
            dist.all_reduce(t, dist.ReduceOp.MAX)

    net = Net(seed=3)
    optimizer = sharded(net, "muon")
    before = [p.detach().clone() for p in net.parameters()]
    scale = torch.tensor(8.0)
    loss = losses(net, 1, world.world_size)[world.rank][0]
    (loss() * scale * (float("inf") if world.rank == world.world_size - 1 else 1.0)).backward()
    found = unscale_gradients(optimizer.gradient_shards(), scale)
    reduce(found)
    optimizer.zero_grad()
    results = [found.item()]
    scaler = LossScaler(init_scale=8.0, reduce=reduce)
    for bad in (True, False):
        factor = float("inf") if bad and world.rank == world.world_size - 1 else 1.0
        scaler.scale(loss() * factor).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_gradients(0.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        unchanged = all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
        results.append((unchanged, scaler._scale.item(), norm.item()))
    plain = Net(seed=3)
    single_optimizer = single(plain, "muon")
    for rank_losses in losses(plain, 1, world.world_size):
        (rank_losses[0]() / world.world_size).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    single_optimizer.step()
    pairs = zip(net.parameters(), plain.parameters())
    results.append(max((p - q).abs().max().item() for p, q in pairs if p.numel()))
    results.append(norm.item())
    return results


def abandoned(world):
    """A backward that is thrown away, of which rank 0 had only a part of one bucket, or nothing.

    Returns whether the next step is as if it had not been.
    """
    nets = Net(), Net(), Net()
    for net, had in zip(nets, ("no backward", "a part", "nothing")):
        optimizer = DistAdamW(net.parameters(), lr=0.01, bucket_bytes=600)
        if had != "no backward":
            if world.rank > 0:
                losses(net, 1, world.world_size)[world.rank][0]().backward()
            elif had == "a part":
                net.bias.sum().backward()
            else:
                optimizer.finish()
            optimizer.zero_grad()
        losses(net, 2, world.world_size)[world.rank][0]().backward()
        optimizer.step()
    return all(
        torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(*(net.parameters() for net in nets))
    )


def traffic(world):
    "What leaves when, counted in a model of eight equal layers."
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    optimizer = DistAdamW(model.parameters(), bucket_bytes=64 * 64 * 4)
    x = torch.randn(4, 64)
    out = {}
    wire = optimizer.wire
    for _ in range(3):
        wire.calls = wire.bytes = 0
        kernel = bytes_sent()
        wire.spans = []
        model(x).square().mean().backward()
        out["launched in backward"] = optimizer.reducer.launched
        out["gradients left"] = sum(p.grad is not None for p in model.parameters())
        optimizer.finish()
        out["parts"] = sum(g.numel() for g in optimizer.gradient_shards())
        out["whole gradients left"] = sum(b.full is not None for b in optimizer.buckets)
        optimizer.step()
        if dist.is_initialized():
            dist.barrier()
        out["bytes"] = wire.bytes
        out["calls"] = wire.calls
        out["kernel"] = bytes_sent() - kernel
    out["spans"] = wire.spans
    try:
        model(x).sum().backward()
        model(x).sum().backward()
        out["second backward"] = "went through"
    except RuntimeError as error:
        out["second backward"] = str(error)
    return out


def bytes_sent():
    "Bytes that the kernel has sent for this process on its TCP connections and that arrived (Linux)."
    import os
    import stat

    total = 0
    if not sys.platform.startswith("linux"):
        return total
    for fd in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{fd}").st_mode):
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except (OSError, struct.error):
            pass
    return total


def gpt(world, kind, dtype=torch.float64):
    "`make_zero` on a small GPT with fused qkv and grouped queries, against `make_optimizer`."
    config = GPTConfig.modern(vocab_size=17, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    torch.manual_seed(world.rank)
    model = GPT(config).to(dtype)
    torch.manual_seed(0)
    alone = GPT(config).to(dtype)
    optimizer, line = make_zero(model, groups_for(kind, model, 0.01))
    reference, _ = make_optimizer(groups_for(kind, alone, 0.01), "own")
    for step in range(5):
        idx = torch.randint(17, (world.world_size, 2, 9), generator=torch.Generator().manual_seed(step))
        model(idx[world.rank, :, :-1], idx[world.rank, :, 1:])[1].backward()
        for rank in range(world.world_size):
            (alone(idx[rank, :, :-1], idx[rank, :, 1:])[1] / world.world_size).backward()
        optimizer.clip_gradients(1.0)
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        reference.step()
        reference.zero_grad()
    worst = max((p - q).abs().max().item() for p, q in zip(model.parameters(), alone.parameters()))
    return worst, line, optimizer.state_bytes(), [g["lr"] for g in optimizer.param_groups]


def everything(world, chain, device="cpu"):
    "All checks of this number of ranks."
    torch.set_num_threads(1)
    if device == "cuda":
        dist.barrier()
        dist.destroy_process_group()
        world = init_world("cuda")
        device = str(world.device)
    kinds = ("adamw", "muon")
    out = {}
    for kind in kinds:
        for bits in (64, 32):
            out[kind, bits] = train(world, kind, getattr(torch, f"float{bits}"), device=device)
    if device == "cpu":
        out["native"] = max(train(world, kind, torch.float64, steps=6, native=True) for kind in kinds)
        out["chain"] = {kind: chained(world, kind, *chain[kind]) for kind in chain}
        out["overflow"] = overflow(world)
        out["gpt"] = {kind: gpt(world, kind) for kind in kinds}
        out["traffic"] = traffic(world)
        out["abandoned"] = abandoned(world)
    return out


START = {kind: (None, [p.detach() for p in Net().parameters()]) for kind in ("adamw", "muon")}


RESULTS = {}


def results(world_size):
    """What every rank returned.

    Each number of ranks goes on from the state that the one below it saved. A failure is kept too, not waited
    for again.
    """
    if world_size not in RESULTS:
        try:
            if world_size == 1:
                RESULTS[1] = [everything(World(), START)]
            else:
                chain = {kind: made[:2] for kind, made in results(world_size - 1)[0]["chain"].items()}
                RESULTS[world_size] = run_processes(everything, world_size, chain, timeout=800)
        except Exception as error:
            RESULTS[world_size] = error
    if isinstance(RESULTS[world_size], Exception):
        raise RESULTS[world_size]
    return RESULTS[world_size]


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
KINDS = pytest.mark.parametrize("kind", ["adamw", "muon"])


# ---- equal to one process ------------------------------------------------------------------------


@pytest.mark.slow
@WORLDS
@KINDS
@pytest.mark.parametrize("bits, tolerance", [(64, 1e-12), (32, 1e-4)])
def test_thirty_steps_with_clipping_and_accumulation_equal_one_process_on_the_whole_batch(
    world_size, kind, bits, tolerance
):
    for rank, result in enumerate(results(world_size)):
        assert result[kind, bits] <= tolerance, f"rank {rank}"


@WORLDS
def test_the_collectives_of_the_backend_give_the_same(world_size):
    for result in results(world_size):
        assert result["native"] <= 1e-12


@WORLDS
@KINDS
def test_make_zero_trains_a_gpt_as_make_optimizer_does(world_size, kind):
    for result in results(world_size):
        worst, line, state, rates = result["gpt"][kind]
        assert worst <= 1e-12 and f"of {world_size} keeps" in line
        assert set(rates) == ({0.01} if kind == "adamw" else {0.01, 5e-3})


# ---- state dicts ---------------------------------------------------------------------------------


@WORLDS
@KINDS
def test_a_run_goes_on_bit_for_bit_on_another_number_of_ranks(world_size, kind):
    for result in results(world_size):
        state, weights, differ, wrong = result["chain"][kind]
        if kind == "adamw":
            assert differ == [] and wrong == ""
        else:  # a stack of other matrices may round otherwise
            for p, q in zip(weights, results(world_size)[0]["chain"][kind][1]):
                assert torch.equal(p, q)


@WORLDS
@KINDS
def test_only_rank_0_holds_the_whole_state(world_size, kind):
    first, *rest = [result["chain"][kind][0] for result in results(world_size)]
    assert len(first["state"]) == 9  # of ten parameters one is frozen
    assert all(
        not other["state"] and len(other["param_groups"]) == len(first["param_groups"]) for other in rest
    )
    assert all(t.device.type == "cpu" for entry in first["state"].values() for t in entry.values())


@KINDS
def test_the_state_of_four_ranks_goes_back_into_one_process(kind):
    state, weights, *_ = results(4)[0]["chain"][kind]
    steps = 16  # four on each number of ranks
    net = Net()
    reference = single(net, kind)
    reference.load_state_dict(state)
    for entry in (e for e in reference.state.values() if "step" in e):
        assert entry["step"] in (steps, steps // 2)  # `odd` has a gradient in every other step only
    sizes = {tuple(p.shape) for p in reference.state}
    assert (3, 1, 5) in sizes and () in sizes


def test_a_state_dict_is_what_torchs_fused_adamw_understands_and_the_other_way_round():
    net, other = Net(dtype=torch.float32), Net(dtype=torch.float32)
    ours = DistAdamW(adamw_groups(net, 0.01))
    fused, name = make_adamw(adamw_groups(other, 0.01))
    assert name == "fused"

    def step(model, optimizer, seed):
        x = torch.randint(11, (8,), generator=torch.Generator().manual_seed(seed))
        F.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(3):
        step(net, ours, seed)
    other.load_state_dict(net.state_dict())
    fused.load_state_dict(ours.state_dict())
    for seed in range(3, 6):
        step(net, ours, seed)
        step(other, fused, seed)
    torch.testing.assert_close(list(net.parameters()), list(other.parameters()))
    ours.load_state_dict(fused.state_dict())
    net.load_state_dict(other.state_dict())
    for seed in range(6, 9):
        step(net, ours, seed)
        step(other, fused, seed)
    torch.testing.assert_close(list(net.parameters()), list(other.parameters()))


def test_a_muon_state_dict_goes_to_one_process_with_fused_adamw_and_back():
    config = GPTConfig.modern(vocab_size=17, block_size=8, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT(config)
    other = copy.deepcopy(model)
    ours, _ = make_zero(model, both_kinds(model))
    idx = torch.randint(17, (4, 9))

    def step(model, optimizer):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, ours)
    theirs, _ = make_optimizer(both_kinds(other))
    theirs.load_state_dict(ours.state_dict())
    other.load_state_dict(model.state_dict())
    step(model, ours)
    step(other, theirs)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
    ours.load_state_dict(theirs.state_dict())
    step(model, ours)
    step(other, theirs)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


def test_a_state_dict_of_another_model_changes_nothing():
    net = Net()
    ours = sharded(net, "muon")
    F.cross_entropy(net(torch.arange(11)), torch.arange(11)).backward()
    ours.step()
    good = ours.state_dict()
    fewer, lacking, turned = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    fewer["param_groups"][0]["params"].pop()
    del lacking["state"][0]["momentum_buffer"]
    turned["state"][0]["momentum_buffer"] = turned["state"][0]["momentum_buffer"].T.clone()
    for bad in (fewer, lacking, turned):
        bad["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match="saved"):
            ours.load_state_dict(bad)
        assert ours.param_groups[0]["lr"] == 0.03 and same_state(ours.state_dict(), good) == ""


# ---- memory and traffic --------------------------------------------------------------------------


@pytest.fixture
def pretend():
    "A process group that sends nothing, so that any rank of any number can be looked at here."

    def start(rank, world_size):
        stop()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    def stop():
        if dist.is_initialized():
            dist.destroy_process_group()

    yield start
    stop()


@pytest.mark.parametrize("world_size", [2, 4])
@KINDS
def test_each_rank_of_a_124_m_model_keeps_its_share_of_the_state(pretend, world_size, kind):
    config = GPTConfig.gpt2()
    with torch.device("meta"):
        model = GPT(config)
    total = make_zero(model, groups_for(kind, model, 0.01))[0].state_bytes()
    count = sum(p.numel() for p in model.parameters())
    assert 123e6 < count < 126e6
    if kind == "adamw":
        assert total == 8 * count
    largest = max(p.nbytes for p in model.parameters())
    shares = []
    for rank in range(world_size):
        pretend(rank, world_size)
        with torch.device("meta"):
            model = GPT(config)
        shares.append(make_zero(model, groups_for(kind, model, 0.01))[0].state_bytes())
    assert sum(shares) == total
    assert max(shares) <= total / world_size + largest
    assert all(abs(share * world_size / total - 1) < 0.1 for share in shares)


def test_a_state_dict_of_another_rank_than_0_cannot_be_loaded_unless_it_is_whole(pretend):
    pretend(1, 2)
    net = Net()
    optimizer = sharded(net, "muon")
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    with pytest.raises(ValueError, match="on rank 0 only: .*everywhere=True"):
        optimizer.load_state_dict(optimizer.state_dict())
    whole = optimizer.state_dict(everywhere=True)
    whole["param_groups"][0]["lr"] = 5.0
    optimizer.load_state_dict(whole)
    assert optimizer.param_groups[0]["lr"] == 5.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_parts_cover_every_element_once_also_where_nothing_divides(pretend, world_size):
    for sizes in ([(5,)], [(7, 3), (1,), ()], [(1,)], [(2, 2), (3,), (4, 1, 1)]):
        covered = []
        for rank in range(world_size):
            pretend(rank, world_size)
            params = [nn.Parameter(torch.zeros(s)) for s in sizes]
            index = {p: i for i, p in enumerate(params)}
            for bucket in DistAdamW(params).buckets:
                for p, _, where in bucket.segments(params):
                    covered += [(index[p], i) for i in range(where.start, where.stop)]
        assert sorted(covered) == [(i, j) for i, p in enumerate(params) for j in range(p.numel())]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_leave_during_backward_and_only_the_own_part_stays(world_size):
    for result in results(world_size):
        t = result["traffic"]
        assert t["launched in backward"] == 8 and t["gradients left"] == t["whole gradients left"] == 0
    assert sum(result["traffic"]["parts"] for result in results(world_size)) == 8 * 64 * 64


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_new_weights_are_on_their_way_before_the_later_updates(world_size):
    for result in results(world_size):
        order = [kind for kind, *_ in result["traffic"]["spans"] if kind in ("all-gather", "update")]
        assert order == ["all-gather", "update"] * 8  # a span of an update is noted after what it sent
        spans = result["traffic"]["spans"]
        starts = [start for kind, _, start, _ in spans if kind == "all-gather"]
        updates = [start for kind, _, start, _ in spans if kind == "update"]
        assert all(sent < later for sent, later in zip(starts, updates[1:]))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_sends_what_one_all_reduce_would(world_size):
    numbers = 8 * 64 * 64
    padded = 8 * world_size * -(-64 * 64 // world_size)
    for result in results(world_size):
        t = result["traffic"]
        flags = 2 * 8 * 4 * (world_size - 1) // world_size
        assert t["bytes"] == 2 * 4 * padded * (world_size - 1) // world_size + flags
        assert t["calls"] == 8 + 8 + 1
    assert abs(padded / numbers - 1) < 0.01


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's count is read as Linux gives it"
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_kernel_counts_the_same_bytes(world_size):
    sent = [result["traffic"]["kernel"] for result in results(world_size)]
    if not any(sent):
        pytest.skip("this kernel keeps no count")
    expected = results(world_size)[0]["traffic"]["bytes"]
    assert sum(sent) / world_size == pytest.approx(expected, rel=0.15)  # headers and the barrier


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size):
    for result in results(world_size):
        found, bad, good, difference, norm = result["overflow"]
        assert found == 1.0
        unchanged, scale, _ = bad
        assert unchanged and scale == 4.0
        unchanged, scale, norm_of_good = good
        assert not unchanged and scale == 4.0
        assert norm_of_good == pytest.approx(norm, rel=1e-12) and difference < 1e-12


@WORLDS
def test_zero_grad_throws_a_backward_away_on_all_ranks(world_size):
    assert all(result["abandoned"] for result in results(world_size))


@WORLDS
def test_a_second_backward_without_no_sync_is_refused_in_a_sentence(world_size):
    for result in results(world_size):
        assert "no_sync" in result["traffic"]["second backward"]


def claimed_twice(world):
    "What is said where a wrapper and a sharded optimizer both average the gradients of one model."
    said = {}
    for wrapper in (AfterBackward, Overlapped, Bucketed, DistributedDataParallel):
        wrap = functools.partial(wrap_ddp, world=world) if wrapper is DistributedDataParallel else wrapper
        for first in ("wrapper", "optimizer"):
            net = nn.Linear(4, 4)
            second = [wrap, lambda net: DistAdamW(net.parameters())]
            if first == "optimizer":
                second.reverse()
            made = second[0](net)
            try:
                second[1](net)
                said[wrapper.__name__, first] = "nothing"
            except UserError as error:
                said[wrapper.__name__, first] = str(error)
            if first == "optimizer":  # once it has let go, the wrapper is welcome
                made.detach()
                wrap(net)
    net = nn.Linear(4, 4)
    with contextlib.suppress(TypeError):
        wrap_ddp(net, world, no_such_option=True)
    wrap_ddp(net, world)  # a wrapper that could not be made holds nothing
    return said


@pytest.mark.slow
def test_gradients_are_averaged_by_one_only_a_wrapper_or_a_sharded_optimizer():
    for said in run_processes(claimed_twice, 2, timeout=240):
        assert len(said) == 8
        for (wrapper, first), sentence in said.items():
            pair = (wrapper, "DistAdamW") if first == "wrapper" else ("DistAdamW", wrapper)
            assert sentence.startswith(f"{pair[1]}: {pair[0]} averages these gradients"), (first, sentence)


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def in_pairs(world):
    "The largest difference of weights from torch's AdamW on one process, after a few steps of two models."
    ours, theirs = ([two_layers(1), two_layers(2)] for _ in range(2))
    how = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    optimizers = [DistAdamW(net.parameters(), **how, bucket_bytes=100) for net in ours]
    reference = torch.optim.AdamW([p for net in theirs for p in net.parameters()], **how)
    x = torch.linspace(-1, 1, 8).view(2, 4).double()

    def loss(a, b, step, rank):  # backward comes to them in another order on each rank
        return (a(b(x + step)) if rank else b(a(x - step))).square().mean()

    for step in range(4):
        loss(*ours, step, world.rank).backward()
        for rank in range(world.world_size):
            (loss(*theirs, step, rank) / world.world_size).backward()
        for optimizer in (*optimizers, reference):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(*([p for net in nets for p in net.parameters()] for nets in (ours, theirs)))
    return max((p - q).abs().max().item() for p, q in pairs)


def test_two_sharded_optimizers_train_as_one_process_in_whatever_order_their_gradients_come():
    "Their messages have no names: those of one would meet the other's, if they left in backward."
    assert max(run_processes(in_pairs, 2, timeout=240)) < 1e-12


def unfinished(world):
    "A backward after a finish, on rank 0 only, and no finish after it."
    net = two_layers(0)
    optimizer = DistAdamW(net.parameters())
    net(torch.ones(2, 4).double()).sum().backward()
    optimizer.finish()
    if world.rank == 0:
        net(torch.ones(2, 4).double()).sum().backward()
    optimizer.clip_gradients(1.0)


def test_a_finish_that_lacks_after_the_last_micro_step_is_an_error_not_a_hang():
    "The rank without a gradient in it waits for something else, until the other one has ended."
    told = r"rank 0 failed:[^$]*a backward came after .*call finish\(\) after"
    with pytest.raises(RuntimeError, match=told):
        run_processes(unfinished, 2, timeout=240)


# ---- alone, without processes --------------------------------------------------------------------


def test_parameters_without_gradient_are_left_as_they_are():
    net = Net()
    optimizer = sharded(net, "adamw")
    before = copy.deepcopy(net.state_dict())
    optimizer.step()  # nobody had a gradient: no decay either
    assert optimizer.state_dict()["state"] == {}
    net.bias.sum().backward()
    optimizer.step()
    changed = [name for name, p in net.state_dict().items() if not torch.equal(p, before[name])]
    assert changed == ["bias"] and len(optimizer.state_dict()["state"]) == 1


def test_what_had_a_gradient_elsewhere_is_read_only_where_one_is_lacking_here(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or tolist(t))
    net = Net()
    optimizer = DistAdamW([net.emb, net.fused, net.a, net.b, net.c, net.scalar, net.odd, net.bias], lr=0.01)
    for use_a in (True, True, False):
        before = net.a.clone()
        net(torch.arange(5), use_a=use_a).square().mean().backward()
        optimizer.step()
        assert (len(reads) == 0) is use_a and (not torch.equal(net.a, before)) is use_a
    net(torch.arange(5)).square().mean().backward()  # two micro-steps, one of them with everything
    optimizer.finish()
    net(torch.arange(5), use_a=False).square().mean().backward()
    optimizer.finish()
    optimizer.step()
    assert reads == [(8,)]


def test_gradients_that_share_memory_are_not_scaled_twice():
    "Autograd leaves a.T + b.T gradients in one memory; torch's own clipping would scale them twice."
    a, b = nn.Parameter(torch.ones(7, 9)), nn.Parameter(torch.ones(7, 9))
    optimizer = DistMuon([a, b])
    (torch.arange(18.0).view(2, 9) @ (a.T + b.T)).square().mean().backward()
    one, other = optimizer.gradient_shards()
    before = one.clone()
    one.mul_(2)
    assert torch.equal(other, before)


def test_a_gradient_of_an_earlier_micro_step_counts_though_the_last_has_none():
    net, alone = Net(), Net()
    optimizer, reference = sharded(net, "adamw"), single(alone, "adamw")
    for model, context in ((net, optimizer.no_sync), (alone, contextlib.nullcontext)):
        with context():
            model(torch.arange(5)).square().sum().backward()
        model(torch.arange(5), use_a=False, use_odd=False).square().sum().backward()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(list(net.parameters()), list(alone.parameters()), atol=1e-14, rtol=0)


def test_a_gradient_that_comes_under_no_sync_after_a_finish_counts():
    net, alone = Net(), Net()
    optimizer, reference = sharded(net, "adamw"), single(alone, "adamw")
    net(torch.arange(3)).square().sum().backward()
    optimizer.finish()
    with optimizer.no_sync():
        net(torch.arange(5)).square().sum().backward()
    optimizer.finish()
    for count in (3, 5):
        alone(torch.arange(count)).square().sum().backward()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(list(net.parameters()), list(alone.parameters()), atol=1e-14, rtol=0)


def test_a_model_that_was_moved_after_its_optimizer_was_made_is_refused_not_left_untrained():
    net = Net()
    optimizer = sharded(net, "adamw")
    net.float().double()  # as .cpu().cuda() would: the weights lie in other memory now
    net(torch.arange(5)).square().sum().backward()
    with pytest.raises(UserError, match="moved or cast after its sharded optimizer was made"):
        optimizer.step()


def test_weights_in_buckets_can_be_saved_loaded_and_copied(tmp_path):
    net = Net()
    optimizer = sharded(net, "adamw")
    save_file({k: v.contiguous() for k, v in net.state_dict().items()}, tmp_path / "w.safetensors")
    twin = copy.deepcopy(net)
    x = torch.arange(11)
    F.cross_entropy(net(x), x).backward()
    optimizer.step()
    assert not torch.equal(twin.emb, net.emb)
    net.load_state_dict(load_file(tmp_path / "w.safetensors"))
    weights = optimizer.reducer.bucket_of[net.emb].weights
    assert torch.equal(twin.emb, net.emb)
    assert net.emb.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()


def test_a_parameter_that_is_no_longer_frozen_is_refused_not_left_untrained():
    net = Net()
    optimizer = sharded(net, "adamw")
    net.frozen.requires_grad_(True)
    net(torch.arange(5)).square().sum().backward()
    with pytest.raises(UserError, match="1 parameters were frozen .*make the optimizer after that"):
        optimizer.step()
    optimizer.detach()
    optimizer, before = sharded(net, "adamw"), net.frozen.clone()
    optimizer.zero_grad()
    net(torch.arange(5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(net.frozen, before)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_without_its_buckets_is_refused_and_the_way_to_one_works(how):
    net, x = Net(), torch.arange(11)
    optimizer = sharded(net, "muon")
    F.cross_entropy(net(x), x).backward()
    optimizer.step()
    with pytest.raises(UserError, match="cannot be copied or pickled: copy the model, .*everywhere=True"):
        how(optimizer)
    twin = copy.deepcopy(net)
    other = sharded(twin, "muon")
    other.load_state_dict(optimizer.state_dict(everywhere=True))
    for model, o in ((net, optimizer), (twin, other)):
        F.cross_entropy(model(x), x).backward()
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters()))


def test_a_backward_after_the_clipping_must_be_finished_before_the_step():
    net, alone = Net(), Net()
    optimizer, reference = sharded(net, "adamw"), single(alone, "adamw")
    for model in (net, alone):
        model(torch.arange(5)).square().sum().backward()
        if model is net:
            optimizer.clip_gradients(0.0)
        model(torch.arange(3)).square().sum().backward()
    for use in (optimizer.step, optimizer.gradient_shards):
        with pytest.raises(RuntimeError, match=r"call finish\(\) after the last one too, on all ranks"):
            use()
    optimizer.finish()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(list(net.parameters()), list(alone.parameters()), atol=1e-14, rtol=0)


def test_an_optimizer_that_is_gone_does_not_hold_back_the_next_ones_messages():
    first = weakref.ref(sharded(Net(), "muon").reducer)
    net = Net()
    optimizer = sharded(net, "adamw")
    second = weakref.ref(optimizer.reducer)
    del optimizer
    net(torch.arange(5)).square().sum().backward()  # the hooks that it left do nothing
    assert first() is second() is None and net.emb.grad is not None


def test_two_sharded_optimizers_on_one_model_are_refused_until_the_first_is_detached():
    net = Net()
    first = sharded(net, "adamw")
    with pytest.raises(UserError, match="DistAdamW averages these gradients .*detach"):
        sharded(net, "adamw")
    first.detach()
    second = sharded(net, "adamw")
    second.detach()


def test_bad_input_is_told_in_a_sentence():
    with pytest.raises(UserError, match="optimizer = sgd"):
        make_zero(nn.Linear(2, 2), [dict(kind="sgd", params=[])])
    with pytest.raises(UserError, match="not a matrix"):
        DistMuon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(UserError, match="lr = -1"):
        DistAdamW([nn.Parameter(torch.zeros(3))], lr=-1)
    with pytest.raises(UserError, match="one and the same wire"):
        ZeroOptimizer(DistMuon([nn.Parameter(torch.zeros(3, 2))]), DistAdamW([nn.Parameter(torch.zeros(3))]))
    optimizer = DistAdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(UserError, match="make a new one"):
        optimizer.add_param_group(dict(params=[nn.Parameter(torch.zeros(2))]))


def test_there_is_one_update_rule():
    "Two copies of a rule drift apart: both optimizers call the pure function of the chapter that made it."
    import tinygpt.adamw
    import tinygpt.muon
    import tinygpt.zero as zero

    assert zero.adamw_update is tinygpt.adamw.adamw_update and zero.update_parts is tinygpt.muon.update_parts
    source = open(zero.__file__).read()
    assert not any(word in source for word in ("addcdiv", "sqrt", "lerp", "newton_schulz("))


# ---- on GPUs -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@KINDS
@pytest.mark.parametrize("bits, tolerance", [(64, 1e-12), (32, 1e-4)])
def test_thirty_steps_with_nccl_equal_one_process(kind, bits, tolerance):
    for result in cuda_results():
        assert result[kind, bits] <= tolerance


@functools.cache
def cuda_results():
    return run_processes(everything, min(torch.cuda.device_count(), 4), START, "cuda", timeout=800)


def test_a_state_dict_brings_its_rates_and_decay_as_torchs_does():
    settings = dict(lr=0.5, betas=(0.6, 0.7), eps=1e-3, weight_decay=0.3)
    net, other, third = Net(), Net(), Net()
    saved = DistAdamW(adamw_groups(net, **settings)).state_dict()
    ours = DistAdamW(adamw_groups(other, 0.01))
    torchs = torch.optim.AdamW(adamw_groups(third, 0.01))
    ours.load_state_dict(saved)
    torchs.load_state_dict(saved)
    for group, theirs in zip(ours.param_groups, torchs.param_groups, strict=True):
        assert {k: group[k] for k in settings} == {k: theirs[k] for k in settings}
    assert ours.param_groups[0]["weight_decay"] == 0.3 and ours.param_groups[0]["lr"] == 0.5
