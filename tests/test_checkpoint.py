import copy
import json
import multiprocessing as mp
import os
import signal
import time

import pytest
import torch

from tinygpt.adamw import AdamW, make_adamw, param_groups
from tinygpt.checkpoint import (
    checkpoints, find_checkpoint, keep_last, load_model, load_training_state, rng_state, save_checkpoint, set_rng_state, verify_checkpoint,
)  # fmt: skip
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

SMALL = dict(vocab_size=257, block_size=8, n_layer=2, n_head=2, n_embd=16)
VARIANTS = {"gpt2": GPTConfig.gpt2(**SMALL, dropout=0.2), "llama": GPTConfig.llama(**SMALL, n_kv_head=1), "modern": GPTConfig.modern(**SMALL)}


def build(config=VARIANTS["gpt2"], seed=0, implementation="own"):
    torch.manual_seed(seed)
    model = GPT(config)
    return model, make_adamw(param_groups(model), 1e-2, implementation=implementation)[0]


def train(model, opt, first, last):
    losses = []
    for step in range(first, last):
        idx = torch.randint(257, (4, 9), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def run(tmp_path):
    model, opt = build()
    for step in (1, 2, 3):
        train(model, opt, step - 1, step)
        save_checkpoint(tmp_path / f"run/checkpoints/step_{step:06d}", model, ByteTokenizer(), opt, {"step": step})
    return tmp_path / "run"


@pytest.mark.parametrize("implementation", ["own", "fused", "foreach"])
@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_resuming_equals_not_stopping_bit_for_bit(tmp_path, implementation, stop):
    model, opt = build(implementation=implementation)
    straight = train(model, opt, 0, 12)
    again, opt2 = build(implementation=implementation)
    before = train(again, opt2, 0, stop)
    save_checkpoint(tmp_path / "c", again, ByteTokenizer(), opt2, {"step": stop, "loader": {"step": stop}})
    torch.manual_seed(99)
    resumed, opt3 = build(seed=7, implementation=implementation)
    state = load_training_state(tmp_path / "c", resumed, opt3)
    assert state["step"] == stop and state["loader"] == {"step": stop}
    assert before + train(resumed, opt3, stop, 12) == straight
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters()))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_loads_without_its_trainer_and_gives_the_same_logits(tmp_path, name):
    model, _ = build(VARIANTS[name])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    save_checkpoint(tmp_path / "c", model, ByteTokenizer())
    loaded, tokenizer, folder = load_model(tmp_path / "c")
    idx = torch.arange(8)[None]
    assert torch.equal(loaded(idx)[0], model.eval()(idx)[0]) and not loaded.training
    assert loaded.config == model.config and tokenizer.fingerprint == ByteTokenizer().fingerprint and folder == tmp_path / "c"
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(loaded.parameters(), model.parameters()))


def test_saving_does_not_disturb_the_run(tmp_path):
    (a, opt_a), (b, opt_b) = build(), build()
    torch.manual_seed(1)
    plain = train(a, opt_a, 0, 6)
    torch.manual_seed(1)
    saved = train(b, opt_b, 0, 3)
    save_checkpoint(tmp_path / "c", b, ByteTokenizer(), opt_b)
    assert saved + train(b, opt_b, 3, 6) == plain


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "model.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_to_any_file_is_noticed_named_and_the_one_before_is_used(run, name, damage, capsys):
    path = run / "checkpoints/step_000003" / name
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    elif damage == "truncate":
        path.write_bytes(raw[:-1])
    else:
        path.unlink()
    assert name in verify_checkpoint(path.parent)
    assert find_checkpoint(run).name == "step_000002"
    assert name in capsys.readouterr().out


def test_no_good_checkpoint_is_one_sentence(run, tmp_path):
    for folder in checkpoints(run):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="no good checkpoint"):
        find_checkpoint(run)
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no checkpoint"):
        find_checkpoint(tmp_path / "empty")


def test_the_newest_is_found_by_number_not_by_name(run):
    (run / "checkpoints/step_000003").rename(run / "checkpoints/step_1000000")
    assert [p.name for p in checkpoints(run)] == ["step_000001", "step_000002", "step_1000000"]
    assert find_checkpoint(run).name == "step_1000000"


def test_keep_last_removes_the_oldest(run):
    keep_last(run, 5)
    assert len(checkpoints(run)) == 3
    keep_last(run, 2)
    assert [p.name for p in checkpoints(run)] == ["step_000002", "step_000003"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_another_model_or_optimizer_is_refused_with_what_differs(run):
    model, opt = build(copy.replace(VARIANTS["gpt2"], n_layer=3) if hasattr(copy, "replace") else GPTConfig.gpt2(**{**SMALL, "n_layer": 3}, dropout=0.2))
    with pytest.raises(UserError, match="n_layer = 2 there, 3 here"):
        load_training_state(find_checkpoint(run), model, opt)
    model, _ = build()
    with pytest.raises(UserError, match="optimizer"):
        load_training_state(find_checkpoint(run), model, AdamW(list(model.parameters())[:3]))


def test_the_random_state_survives_json():
    torch.manual_seed(3)
    state = json.loads(json.dumps(rng_state()))
    expected = torch.randn(5)
    torch.manual_seed(4)
    set_rng_state(state)
    assert torch.equal(torch.randn(5), expected)


def save_for_ever(folder):
    model, opt = build()
    train(model, opt, 0, 1)
    step = 0
    while True:
        step += 1
        save_checkpoint(folder / f"checkpoints/step_{step:06d}", model, ByteTokenizer(), opt, {"step": step})
        keep_last(folder, 2)


def test_a_process_killed_while_saving_leaves_only_checkpoints_that_load(tmp_path):
    for i in range(5):
        folder = tmp_path / str(i)
        process = mp.get_context("spawn").Process(target=save_for_ever, args=(folder,), daemon=True)
        process.start()
        deadline = time.time() + 60
        while not checkpoints(folder) and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(0.013 * i)  # another moment each time
        os.kill(process.pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        process.join()
        assert checkpoints(folder) and all(verify_checkpoint(c) == "" for c in checkpoints(folder))
        load_model(folder)
