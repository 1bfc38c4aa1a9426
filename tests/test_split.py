"""Layers cut over ranks and pipelines of stages, against the whole GPT in one process and against torch.

1, 2 and 4 processes are started once each and do everything; the tests look at what came back.
"""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tinygpt.split
from tinygpt.adamw import AdamW, adamw_groups
from tinygpt.attention import same_document
from tinygpt.ddp.world import run_processes
from tinygpt.ddp.wrap import CountCollectives
from tinygpt.model import GPT, MLP, Attention, GPTConfig, KVCache
from tinygpt.split import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitAttention,
    SplitMLP,
    Stage,
    copy_to_ranks,
    gather_whole,
    gpipe_order,
    head_rows,
    one_f_one_b_order,
    pipeline_step,
    replicas_apart,
    split_layers,
    sum_over_ranks,
)
from tinygpt.support import UserError

pytestmark = pytest.mark.timeout(1200)

SIZE = dict(vocab_size=50, block_size=12, n_layer=4, n_embd=32, n_head=4)
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZE),
    "llama": GPTConfig.llama(**SIZE, n_kv_head=2, mlp_hidden=48),
    "modern": GPTConfig.modern(**SIZE, init="gpt2"),
}
UNTIED = {name: GPTConfig(**vars(c) | dict(tie_weights=False)) for name, c in CONFIGS.items()}
EXACT = dict(atol=1e-10, rtol=0)
ORDERS = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}


def fresh(config, seed=0):
    torch.manual_seed(seed)
    model = GPT(config).double()
    for p in model.parameters():  # norms and biases too: zeros and ones would hide mistakes
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)
    return model


def batch(step, rows=8):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randint(50, (2, rows, 12), generator=g)
    y[: rows // 2, 3:] = -100  # the micro-batches have unequal numbers of targets
    return x, y


def named(model, grad=False):
    return {name: (p.grad if grad else p.detach()).clone() for name, p in model.named_parameters()}


@cache
def alone(name, configs="tied", steps=5):
    "One process with the whole GPT: losses, gradients of the last step, weights after it."
    model = fresh((CONFIGS if configs == "tied" else UNTIED)[name])
    optimizer = AdamW(adamw_groups(model, 1e-2))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step))[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named(model, grad=True), named(model)


def is_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, name=name: f"{name}: {m}", **EXACT)


# ---- tensor parallelism


def split_training(name, group=None):
    model = split_layers(fresh(CONFIGS[name], seed=dist.get_rank() if dist.is_initialized() else 0), group)
    found = {"start": gather_whole(model), "losses": [], "apart": []}
    optimizer = AdamW(adamw_groups(model, 1e-2))
    for step in range(5):
        optimizer.zero_grad()
        with CountCollectives() as forward:
            loss = model(*batch(step))[1]
        with CountCollectives() as backward:
            loss.backward()
        optimizer.step()
        found["losses"].append(loss.item())
        found["apart"].append(replicas_apart(model, group))
    found["grads"], found["weights"] = gather_whole(model, lambda p: p.grad), gather_whole(model)
    found["calls"] = [(dict(c.calls), dict(c.bytes)) for c in (forward, backward)]
    found["mine"] = named(model)
    return found


def without_f(name):
    "The bug: f does nothing in backward."
    right = tinygpt.split.copy_to_ranks
    tinygpt.split.copy_to_ranks = lambda x, group=None: x
    try:
        return split_training(name)
    finally:
        tinygpt.split.copy_to_ranks = right


def f_and_g(world):
    "Each rank has another x and another weight in the loss."
    found = []
    for function in (copy_to_ranks, sum_over_ranks):
        x = torch.full((2, 3), 1.0 + world.rank, requires_grad=True)
        before = x.detach().clone()
        y = function(x)
        (y * 10**world.rank).sum().backward()
        found.append((y.detach(), x.grad, torch.equal(x, before)))
    return found


def one_norm_moved(world):
    model = split_layers(fresh(CONFIGS["gpt2"]))
    found = [replicas_apart(model)]
    with torch.no_grad():
        model.h[2].mlp.c_fc.weight += world.rank  # cut: may differ
        found.append(replicas_apart(model))
        model.h[2].ln_2.bias[5] -= 0.25 * world.rank
    return [*found, replicas_apart(model)]


class Separate(nn.Module):
    "Attention as torch's examples have it: a matrix each for queries, keys and values."

    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(c.n_embd, c.kv_heads * c.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x):
        heads = [w(x).unflatten(2, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)]
        q, k, v = (t.transpose(1, 2) for t in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def beside_torch(world):
    "(ours, torch's parallelize_module) of the outputs and the input's gradients of an MLP and an attention."
    mesh = init_device_mesh("cpu", (world.world_size,))
    c = GPTConfig.llama(**SIZE | dict(n_kv_head=2), position="learned")
    torch.manual_seed(0)
    mlp, theirs, attention = MLP(c).double(), Separate(c).double(), Attention(c, 0).double()
    with torch.no_grad():
        attention.c_attn.weight.copy_(torch.cat([theirs.wq.weight, theirs.wk.weight, theirs.wv.weight]))
        attention.c_proj.weight.copy_(theirs.wo.weight)
    ours = [SplitMLP(mlp), SplitAttention(attention)]
    col, row = ColwiseParallel, RowwiseParallel
    parallelize_module(mlp, mesh, {"c_fc": col(), "c_gate": col(), "c_proj": row()})
    parallelize_module(theirs, mesh, {"wq": col(), "wk": col(), "wv": col(), "wo": row()})
    found = []
    for module in (*ours, mlp, theirs):
        x = torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        y = module(x)
        y.sin().sum().backward()
        found.append((y.detach(), x.grad))
    weights = [(ours[0].c_fc.weight.grad, mlp.c_fc.weight.grad.to_local())]
    weights.append((ours[1].c_proj.weight.grad, theirs.wo.weight.grad.to_local()))
    return found, weights


# ---- pipelines


def pipeline_training(name, order, micro_batches, group=None, split=None, steps=5):
    model = fresh(UNTIED[name], seed=dist.get_rank() if dist.is_initialized() else 0)
    if split is not None:
        model = split_layers(model, split)
    stage = Stage(model, group)
    optimizer = AdamW(adamw_groups(stage, 1e-2))
    losses, most = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with CountCollectives() as count:
            loss, kept = pipeline_step(stage, *batch(step), ORDERS[order], micro_batches, group)
        optimizer.step()
        losses.append(loss)
        most.append(kept)
    whole = gather_whole(stage), gather_whole(stage, lambda p: p.grad)
    return losses, most, *whole, dict(count.calls), dict(count.bytes)


def pipeline_calls(order):
    "What each call of a step sends and receives: (isend or irecv, the other rank)."
    calls, right = [], dist.batch_isend_irecv

    def recorded(messages):
        calls.append([(m.op.__name__, m.group_peer) for m in messages])
        return right(messages)

    dist.batch_isend_irecv = recorded
    try:
        pipeline_training("llama", order, 8, steps=1)
    finally:
        dist.batch_isend_irecv = right
    return calls


class Recorded(PipelineStage):
    def forward_one_chunk(self, i, *args, **kwargs):
        self.steps.append(("F", i))
        return super().forward_one_chunk(i, *args, **kwargs)

    def backward_one_chunk(self, i, *args, **kwargs):
        self.steps.append(("B", i))
        return super().backward_one_chunk(i, *args, **kwargs)


def order_of_torch(world, micro_batches):
    layer = nn.Linear(4, 4)
    stage = Recorded(layer, world.rank, world.world_size, torch.device("cpu"))
    stage.steps = []
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.randn(2 * micro_batches, 4)
    last = world.rank == world.world_size - 1
    schedule.step(*([x] if world.rank == 0 else []), **({"target": x} if last else {}))
    return stage.steps


# ---- all of it, in processes


def problem(make):
    try:
        make()
    except UserError as error:
        return str(error)


def bad_input(world):
    llama = CONFIGS["llama"]
    tied = partial(fresh, CONFIGS["gpt2"])
    odd = GPTConfig(**vars(llama) | dict(n_head=3, n_kv_head=3, n_embd=48))
    stage = Stage(fresh(UNTIED["gpt2"]))
    model = split_layers(fresh(llama)) if world.world_size == 2 else None
    return {
        "heads": problem(lambda: split_layers(fresh(odd))),
        "dropout": problem(lambda: split_layers(GPT(GPTConfig.llama(**SIZE, dropout=0.1)))),
        "dropout in a stage": problem(lambda: Stage(GPT(GPTConfig.llama(**SIZE, dropout=0.1)))),
        "tied": problem(lambda: Stage(tied())),
        "stages": problem(lambda: Stage(fresh(GPTConfig.llama(**SIZE | dict(n_layer=1))))),
        "micro": problem(lambda: pipeline_step(stage, *batch(0), micro_batches=3)),
        "none": problem(lambda: pipeline_step(stage, *batch(0), micro_batches=0)),
        "twice": model and problem(lambda: split_layers(model)),
        "cache": model and problem(lambda: model(batch(0)[0], cache=KVCache(llama, 8, dtype=torch.float64))),
    }


def two(world):
    found = {
        "tp": {name: split_training(name) for name in CONFIGS},
        "without f": without_f("gpt2"),
        "f and g": f_and_g(world),
        "moved": one_norm_moved(world),
        "bad": bad_input(world),
        "pp": {(n, o, m): pipeline_training(n, o, m) for n in UNTIED for o in ORDERS for m in (1, 4)},
        "torch's order": order_of_torch(world, 6),
        "torch": beside_torch(world),
    }
    x, mask = batch(0)[0], same_document(torch.tensor([[0] * 5 + [1] * 7]).expand(8, -1))
    with torch.no_grad():
        found["mask"] = split_layers(fresh(CONFIGS["llama"]))(x, mask=mask)[0]
    return found


def four(world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inside, outside = pairs[world.rank // 2], across[world.rank % 2]
    found = {
        "tp": {name: split_training(name) for name in ("gpt2", "modern")},
        "heads": problem(lambda: split_layers(fresh(CONFIGS["llama"]))),
        "pp": {(n, o): pipeline_training(n, o, 8) for n in ("gpt2", "llama") for o in ORDERS},
        "tp in pp": pipeline_training("llama", "1f1b", 4, outside, split=inside),
        "calls": {order: pipeline_calls(order) for order in ORDERS},
        "outside": problem(lambda: Stage(fresh(UNTIED["llama"]), pairs[1 - world.rank // 2])),
        "torch's order": order_of_torch(world, 8),
    }
    # matrices cut over a pair, rows over the pairs
    model = split_layers(fresh(CONFIGS["llama"]), inside)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=outside)
    x, y = batch(0)
    y = y.clamp(min=0)  # as many targets on each rank: DDP's mean of means is the mean
    rows = slice(4 * (world.rank // 2), 4 * (world.rank // 2) + 4)
    ddp(x[rows], y[rows])[1].backward()
    found["tp in dp"] = gather_whole(model, lambda p: p.grad)
    return found


class Found(dict):
    "Number of processes -> what each returned; they are started when a test asks first."

    def __missing__(self, ranks):
        self[ranks] = run_processes({2: two, 4: four}[ranks], ranks, timeout=900.0)
        return self[ranks]


# four processes take a while to start
FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def found():
    return Found()


@pytest.mark.parametrize("ranks", [1, 2, FOUR])
@pytest.mark.parametrize("name", CONFIGS)
def test_split_layers_train_as_the_whole_gpt_does(found, name, ranks):
    if (name, ranks) == ("llama", 4):
        pytest.skip("two key-value heads")
    losses, grads, weights = alone(name)
    for one in [split_training(name)] if ranks == 1 else [rank["tp"][name] for rank in found[ranks]]:
        is_same(one["start"], named(fresh(CONFIGS[name])))  # rank 0's, though each rank drew its own
        assert one["losses"] == pytest.approx(losses, abs=1e-10)
        is_same(one["grads"], grads)
        is_same(one["weights"], weights)
        assert one["apart"] == [0.0] * 5


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_a_block_has_two_all_reduces_forward_and_two_backward(found, ranks):
    for rank in found[ranks]:
        for one in rank["tp"].values():
            for calls, sizes in one["calls"]:
                assert calls == {"allreduce": 2 * SIZE["n_layer"]}
                assert sizes == {"allreduce": 2 * SIZE["n_layer"] * 8 * 12 * SIZE["n_embd"] * 8}


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_split_mlp_and_split_attention_keep_a_share_of_each_matrix(found, ranks):
    whole = named(fresh(CONFIGS["gpt2"]))
    for name, mine in found[ranks][1]["tp"]["gpt2"]["mine"].items():
        cut = ".attn." in name or ".mlp." in name
        cut = cut and not name.endswith("c_proj.bias")
        assert mine.numel() * (ranks if cut else 1) == whole[name].numel(), name


def test_a_split_model_takes_a_mask(found):
    x, mask = batch(0)[0], same_document(torch.tensor([[0] * 5 + [1] * 7]).expand(8, -1))
    model = fresh(CONFIGS["llama"])
    with torch.no_grad():
        wanted = model(x, mask=mask)[0]
        assert not torch.allclose(wanted, model(x)[0])
    for rank in found[2]:
        torch.testing.assert_close(rank["mask"], wanted, **EXACT)


def test_copy_to_ranks_sums_gradients_and_sum_over_ranks_sums_values(found):
    for rank in range(2):
        (y, grad, untouched), (total, grad_of_sum, also) = found[2][rank]["f and g"]
        assert torch.equal(y, torch.full((2, 3), 1.0 + rank)) and torch.equal(grad, torch.full((2, 3), 11.0))
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert torch.equal(grad_of_sum, torch.full((2, 3), 10.0**rank))
        assert untouched and also


def test_without_the_all_reduce_of_f_the_copies_drift_apart_and_replicas_apart_sees_it(found):
    losses, grads, _ = alone("gpt2")
    for rank in found[2]:
        wrong = rank["without f"]
        assert wrong["losses"][0] == pytest.approx(losses[0], abs=1e-10)  # forward is right
        assert wrong["losses"][-1] < wrong["losses"][0]
        assert all(apart > 1e-3 for apart in wrong["apart"])
        assert (wrong["grads"]["h.0.ln_1.weight"] - grads["h.0.ln_1.weight"]).abs().max() > 1e-4


def test_replicas_apart_is_the_largest_difference_of_what_is_not_cut(found):
    for rank in found[2]:
        assert rank["moved"] == [0.0, 0.0, 0.25]
    assert replicas_apart(split_layers(fresh(CONFIGS["gpt2"]))) == 0.0


def test_head_rows_gives_whole_heads_with_the_keys_and_values_they_read():
    config = GPTConfig(n_head=4, n_kv_head=2, n_embd=8)
    first, second = (rows.tolist() for rows in head_rows(config, 2))
    assert first == [0, 1, 2, 3, 8, 9, 12, 13] and second == [4, 5, 6, 7, 10, 11, 14, 15]
    assert head_rows(config, 1)[0].tolist() == list(range(16))


def test_frozen_layers_stay_frozen():
    for freeze in (True, False):
        model = fresh(CONFIGS["gpt2"])
        model.h[1].requires_grad_(not freeze)
        split_layers(model)
        assert all(p.requires_grad != freeze for p in model.h[1].parameters())
        assert all(p.requires_grad for p in model.h[0].parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_parallel_linear_layers_keep_their_rows_and_columns(bias, monkeypatch):
    whole = nn.Linear(6, 4, bias=bias)
    x = torch.randn(3, 6)
    places = [torch.tensor([2, 0]), torch.tensor([1, 3])]
    halves = [torch.tensor([5, 0, 1]), torch.tensor([2, 3, 4])]
    sums = []
    for rank in range(2):
        monkeypatch.setattr(tinygpt.split, "_place", lambda group, rank=rank: (rank, 1))
        column = ColumnParallelLinear(whole, places, None)
        torch.testing.assert_close(column(x), whole(x)[:, places[rank]])
        row = RowParallelLinear(whole, halves, None)
        part = x[:, halves[rank]] @ whole.weight[:, halves[rank]].T
        torch.testing.assert_close(row(x[:, halves[rank]]), part + whole.bias if bias else part)
        sums.append(part)
    torch.testing.assert_close(sum(sums), F.linear(x, whole.weight))


def test_split_mlp_and_split_attention_equal_torchs_colwise_and_rowwise_parallel(found):
    for rank in found[2]:
        (mlp, attention, their_mlp, their_attention), weights = rank["torch"]
        for ours, theirs in ((mlp, their_mlp), (attention, their_attention)):
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, **EXACT)
        for a, b in weights:
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.slow
def test_groups_put_split_layers_inside_data_parallelism(found):
    model = fresh(CONFIGS["llama"])
    x, y = batch(0)
    model(x, y.clamp(min=0))[1].backward()
    for rank in found[4]:
        is_same(rank["tp in dp"], named(model, grad=True))


# ---- pipelines


def check_stages(results, name, kept):
    "Stages of one pipeline against the whole model."
    losses, grads, weights = alone(name, "untied")
    *before, last = results
    assert all(loss is None for stage in before for loss in stage[0])
    assert [loss.item() for loss in last[0]] == pytest.approx(losses, abs=1e-10)
    assert sum(len(stage[2]) for stage in results) == len(weights)
    is_same({n: w for stage in results for n, w in stage[2].items()}, weights)
    is_same({n: g for stage in results for n, g in stage[3].items()}, grads)
    assert [stage[1] for stage in results] == [[n] * 5 for n in kept]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", UNTIED)
def test_a_stage_and_pipeline_step_train_as_the_whole_gpt_does(found, name, micro_batches, order):
    most = micro_batches if order == "gpipe" else 2
    kept = [min(micro_batches, most), micro_batches if order == "gpipe" else 1]
    check_stages([rank["pp"][name, order, micro_batches] for rank in found[2]], name, kept)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_four_stages_keep_as_many_micro_batches_as_their_order_says(found, name, order):
    kept = [8] * 4 if order == "gpipe" else [4, 3, 2, 1]
    check_stages([rank["pp"][name, order] for rank in found[4]], name, kept)


def test_tied_weights_are_fine_in_a_pipeline_of_one_stage():
    model = fresh(CONFIGS["gpt2"])
    stage = Stage(copy.deepcopy(model))
    loss, _ = pipeline_step(stage, *batch(0), micro_batches=4)
    wanted = model(*batch(0))[1]
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-10)
    torch.testing.assert_close(stage.wte.weight.grad, model.wte.weight.grad, **EXACT)


def test_each_micro_batch_is_sent_once_each_way(found):
    for rank in found[2]:
        *_, calls, sizes = rank["pp"]["llama", "1f1b", 4]
        assert calls["send"] == calls["recv"] == 4
        assert sizes["send"] == sizes["recv"] == 8 * 12 * SIZE["n_embd"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_stages_whose_sends_wait_for_the_receiver_never_wait_for_each_other(found, order):
    # as over NCCL: calls run one after the other, and one ends when all its messages have met
    todo = [copy.deepcopy(rank["calls"][order]) for rank in found[4]]
    assert sum(len(call) for calls in todo for call in calls) == 2 * 2 * 3 * 8  # no message outside of them
    while any(todo):
        now = [calls[0] if calls else [] for calls in todo]
        pairs = [(a, b) for a in range(4) for b in range(4)]
        met = [(a, b) for a, b in pairs if ("isend", b) in now[a] and ("irecv", a) in now[b]]
        assert met, now
        for a, b in met:
            now[a].remove(("isend", b))
            now[b].remove(("irecv", a))
        todo = [calls if not calls or calls[0] else calls[1:] for calls in todo]


def test_capped_logits_of_a_stage_are_float32_under_autocast_as_the_models_are():
    model = fresh(UNTIED["modern"]).float()
    x, y = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = model(x, y, reduction="sum")[1], Stage(model)(x, y)
    torch.testing.assert_close(found, wanted, atol=0, rtol=1e-7)


@pytest.mark.slow
def test_groups_put_split_layers_into_the_stages_of_a_pipeline(found):
    first, second = [[found[4][i]["tp in pp"] for i in ranks] for ranks in ((0, 2), (1, 3))]
    check_stages(first, "llama", [2, 1])
    check_stages(second, "llama", [2, 1])


@pytest.mark.parametrize("stages, micro_batches", [(2, 6), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_one_f_one_b_order_is_that_of_torchs_schedule(found, stages, micro_batches):
    for rank in range(stages):
        assert one_f_one_b_order(rank, stages, micro_batches) == found[stages][rank]["torch's order"]


@pytest.mark.parametrize("order", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize("stages, micro_batches", [(1, 1), (1, 5), (4, 2), (3, 3), (5, 9)])
def test_an_order_has_each_forward_once_and_its_backward_later(order, stages, micro_batches):
    for stage in range(stages):
        steps = order(stage, stages, micro_batches)
        assert sorted(steps) == sorted((kind, i) for kind in "FB" for i in range(micro_batches))
        assert all(steps.index(("F", i)) < steps.index(("B", i)) for i in range(micro_batches))
    assert gpipe_order(0, 2, 3) == [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]


# ---- bad input


def test_bad_input_gets_one_sentence(found):
    for rank in found[2]:
        bad = rank["bad"]
        assert all("\n" not in sentence for sentence in bad.values())
        assert "n_head = 3" in bad["heads"] and "2 ranks" in bad["heads"] and "divides 3" in bad["heads"]
        assert "dropout = 0.1" in bad["dropout"] and "dropout = 0.1" in bad["dropout in a stage"]
        assert "tie_weights = True" in bad["tied"] and "choose False" in bad["tied"]
        assert "2 stages for n_layer = 1" in bad["stages"] and "at most 1" in bad["stages"]
        assert "micro_batches = 3 does not divide 8 rows" in bad["micro"]
        assert "micro_batches = 0" in bad["none"]
        assert "cache" in bad["cache"] and "split already" in bad["twice"]


@pytest.mark.slow
def test_groups_that_cannot_be_get_one_sentence(found):
    assert all("not in the group" in rank["outside"] for rank in found[4])
    assert all("4 ranks" in rank["heads"] and "n_kv_head = 2" in rank["heads"] for rank in found[4])
