"""Checkpoints are whole or absent, damage is noticed, nothing that is loaded runs code or changes a digit."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import tinygpt.checkpoint as checkpoint_module
from tinygpt.adamw import AdamW, adamw_groups, make_adamw
from tinygpt.checkpoint import (
    checkpoints,
    find_checkpoint,
    load_model,
    load_training_state,
    prune,
    rank_by_loss,
    remove_leftovers,
    rng_state,
    rng_states,
    save_checkpoint,
    set_rng_state,
    tensor_bytes,
    unwrap,
    verify_checkpoint,
    what_differs,
)
from tinygpt.data.tokens import sha256_file
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

SMALL = dict(vocab_size=257, block_size=8, n_layer=2, n_head=2, n_embd=16)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL, dropout=0.2),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=1),
    "modern": GPTConfig.modern(**SMALL),
}


def build(config=VARIANTS["gpt2"], seed=0, implementation="own"):
    torch.manual_seed(seed)
    model = GPT(config)
    return model, make_adamw(adamw_groups(model, 1e-2), implementation)[0]


def assert_same_weights(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


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
        save_checkpoint(
            tmp_path / f"run/checkpoints/step_{step:06d}", model, ByteTokenizer(), opt, {"step": step}
        )
    return tmp_path / "run"


def test_the_random_state_of_torch_python_and_numpy_survives_json():
    def draw():
        return {
            "torch": torch.randn(5).tolist(),
            "python": [random.random(), random.gauss(0, 1)],
            "numpy": [*np.random.rand(3).tolist(), np.random.randn()],
        }

    torch.manual_seed(3)
    random.gauss(0, 1)  # this and the next keep the second of a pair of normal numbers
    np.random.randn()
    state = json.loads(json.dumps(rng_state()))
    assert state.keys() == {"cpu", "cuda", "mps", "python", "numpy"}, f"the state has {list(state)}"
    expected = draw()
    set_rng_state(state)
    for name, numbers in draw().items():
        assert numbers == expected[name], f"{name} draws {numbers}, and without the stop {expected[name]}"
    found = rng_states()
    assert isinstance(found, list) and len(found) == 1, "one process: a list with one state"


def test_a_checkpoint_has_these_files_and_a_fingerprint_of_each(tmp_path):
    model, opt = build()
    train(model, opt, 0, 2)
    folder = save_checkpoint(tmp_path / "step_000002", model, ByteTokenizer(), opt, {"step": 2})
    assert folder == tmp_path / "step_000002", f"what is returned is {folder!r}, not the folder"
    others = {"model.safetensors", "model.json", "tokenizer.json", "optimizer.pt", "state.json"}
    found = {path.name for path in folder.iterdir()}
    wanted = others | {"manifest.json"}
    assert found == wanted, f"missing: {sorted(wanted - found)}; too much: {sorted(found - wanted)}"

    stored = load_file(folder / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(stored[name], weight), f"{name} was saved with other numbers"
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    assert saved.keys() == {"state", "param_groups"}, "optimizer.pt is to hold the optimizer's state_dict"
    n, params = len(saved["state"]), len(list(model.parameters()))
    assert n == params, f"the optimizer has means for {params} weights, optimizer.pt for {n}"
    state = json.loads((folder / "state.json").read_text())
    lacking = {"step", "threads", "versions", "rng"} - state.keys()
    assert not lacking, f"state.json lacks {sorted(lacking)}"
    assert state["step"] == 2, f"step is {state['step']}, not the given 2"
    assert len(state["rng"]) == 1, "rng is to be a list with the state of this process's generators"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == others, f"the manifest lists {sorted(manifest)}, not the other files"
    for name in others:
        assert manifest[name] == sha256_file(folder / name), f"not the fingerprint of {name}"

    own = dict(rng=[rng_state(), rng_state()], threads=64)  # of two processes
    folder = save_checkpoint(tmp_path / "two", model, ByteTokenizer(), state=own)
    state = json.loads((folder / "state.json").read_text())
    assert state["rng"] == own["rng"] and state["threads"] == 64, "what `state` has is to stay as it is"
    assert not (folder / "optimizer.pt").exists(), "without an optimizer there is no optimizer.pt"


def test_a_save_that_is_cut_short_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    def killed(*_):
        raise RuntimeError("killed here")

    model, opt = build()
    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(RuntimeError, match="killed here"):
        save_checkpoint(tmp_path / "step_000001", model, ByteTokenizer(), opt)
    why = "half a checkpoint has the name of a whole one: write it beside (atomic_path)"
    assert not (tmp_path / "step_000001").exists(), why


def test_each_part_of_a_run_comes_back(tmp_path):
    model, opt = build()
    train(model, opt, 0, 2)
    folder = save_checkpoint(tmp_path / "c", model, ByteTokenizer(), opt, {"step": 2, "loader": {"step": 2}})
    expected = torch.rand(3)
    other, opt2 = build(seed=5)
    state = load_training_state(folder, other, opt2)
    drawn = torch.rand(3)
    assert isinstance(state, dict), f"what is returned is {state!r}, not the rest of the state"
    assert state["step"] == 2 and state["loader"] == {"step": 2}, f"step and loader: {state}"
    for (name, weight), there in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, there), f"the weight {name} is not back"
    kept, back = opt.state_dict()["state"], opt2.state_dict()["state"]
    assert back.keys() == kept.keys(), f"the optimizer has means for {len(back)} weights, not {len(kept)}"
    for i, parts in kept.items():
        for name, value in parts.items():
            same = torch.equal(torch.as_tensor(back[i][name]), torch.as_tensor(value))
            assert same, f"the optimizer's {name} of weight {i} is not back"
    assert torch.equal(drawn, expected), "torch's generator is not back where it was at the save"


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
    losses = before + train(resumed, opt3, stop, 12)
    other = [step for step, (a, b) in enumerate(zip(losses, straight)) if a != b]
    assert not other, (
        f"stopped after {stop} steps; the losses of steps {other} are others than without a stop"
    )
    assert_same_weights(resumed, model)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_loads_without_its_trainer_and_gives_the_same_logits(tmp_path, name):
    model, _ = build(VARIANTS[name])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    save_checkpoint(tmp_path / "c", model, ByteTokenizer())
    before = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        loaded, tokenizer, folder = load_model(tmp_path / "c")
    finally:
        torch.use_deterministic_algorithms(False)
    moved = not torch.equal(torch.get_rng_state(), before)
    assert not moved, "loading draws random numbers, so a run that loads would be another one (Undrawn)"
    assert not loaded.training, "the loaded model is in training mode, so its dropout is on"
    idx = torch.arange(8)[None]
    assert torch.equal(loaded(idx)[0], model.eval()(idx)[0]), "the loaded model has other logits"
    assert loaded.config == model.config and folder == tmp_path / "c"
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert_same_weights(loaded, model)
    for ours, theirs in zip(loaded.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_saving_does_not_disturb_the_run(tmp_path):
    a, opt_a = build()
    b, opt_b = build()
    torch.manual_seed(1)
    plain = train(a, opt_a, 0, 6)
    torch.manual_seed(1)
    saved = train(b, opt_b, 0, 3)
    save_checkpoint(tmp_path / "c", b, ByteTokenizer(), opt_b)
    assert saved + train(b, opt_b, 3, 6) == plain


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "state.json", "model.json", "tokenizer.json"]
)
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
    said = verify_checkpoint(path.parent)
    assert name in said, f"{name} is damaged ({damage}), and verify_checkpoint says {said!r}"
    assert find_checkpoint(run).name == "step_000002", f"{name} of step 3 is damaged: use step 2"
    assert name in capsys.readouterr().out


def test_no_good_checkpoint_is_one_sentence(run, tmp_path):
    for folder in checkpoints(run):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=re.escape(str(run))):
        find_checkpoint(run)
    with pytest.raises(UserError, match="nowhere"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        find_checkpoint(tmp_path / "empty")


def test_the_newest_is_found_by_number_not_by_name(run):
    (run / "checkpoints/step_000002").rename(run / "checkpoints/step_999999")
    (run / "checkpoints/step_000003").rename(run / "checkpoints/step_1000000")  # by name before 999999
    found, wanted = [p.name for p in checkpoints(run)], ["step_000001", "step_999999", "step_1000000"]
    assert found == wanted, f"oldest first they are {found}, not {wanted}"
    assert find_checkpoint(run).name == "step_1000000", f"found {find_checkpoint(run).name}"


def test_a_file_with_the_name_of_a_checkpoint_is_none_and_stays(run):
    note = run / "checkpoints/step_000009"
    note.write_text("mine")
    assert find_checkpoint(run).name == "step_000003"
    assert [p.name for p in prune(run, 1)] == ["step_000003"] and note.read_text() == "mine"
    note.unlink()
    (run / "checkpoints/step_000001").write_text("mine")  # older than what stays
    save_checkpoint(run / "checkpoints/step_000004", build()[0], ByteTokenizer())
    assert [p.name for p in prune(run, 1)] == ["step_000004"]
    assert (run / "checkpoints/step_000001").read_text() == "mine"


def test_the_oldest_are_removed(run):
    prune(run, 5)
    assert len(checkpoints(run)) == 3
    prune(run, 2)
    assert [p.name for p in checkpoints(run)] == ["step_000002", "step_000003"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_folder_of_checkpoints_that_cannot_be_read_is_told_and_not_taken_for_an_empty_one(
    tmp_path, monkeypatch, code
):
    "As root may read everything, the system's answer is a fake."
    folder = tmp_path / "run/checkpoints"
    (folder / "step_000001").mkdir(parents=True)

    def refused(list_folder):
        def listed(place="."):
            if Path(place) == folder:
                raise OSError(code, os.strerror(code), str(place))
            return list_folder(place)

        return listed

    monkeypatch.setattr(os, "listdir", refused(os.listdir))
    monkeypatch.setattr(os, "scandir", refused(os.scandir))
    told = re.escape(f"{folder} cannot be read ({os.strerror(code)}): ")
    for ask in (checkpoints, find_checkpoint, partial(prune, keep=1)):
        with pytest.raises(UserError, match=told):
            ask(tmp_path / "run")
    monkeypatch.undo()
    assert len(checkpoints(tmp_path / "run")) == 1
    assert checkpoints(tmp_path / "none") == checkpoints(folder) == [] == checkpoints(Path(__file__))


def test_another_model_or_optimizer_is_refused_with_what_differs(run):
    model, opt = build(replace(VARIANTS["gpt2"], n_layer=3))
    with pytest.raises(UserError, match="n_layer = 2 there, 3 here"):
        load_training_state(find_checkpoint(run), model, opt)
    model, _ = build()
    with pytest.raises(UserError, match="optimizer"):
        load_training_state(find_checkpoint(run), model, AdamW(list(model.parameters())[:3]))


@pytest.mark.parametrize("refused", ["optimizer", "no random state"])
def test_where_a_state_is_refused_nothing_has_changed(run, refused):
    train(*build(), 0, 1)  # numbers are drawn
    model, opt = build(seed=5)
    folder, loaded = find_checkpoint(run), opt
    if refused == "optimizer":
        loaded = AdamW(list(model.parameters())[:3])
    else:
        state = json.loads((folder / "state.json").read_text())
        state["rng"][0]["numpy"] = "of another kind"  # torch's, which comes first, is sound
        (folder / "state.json").write_text(json.dumps(state))
    kept, rng = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(UserError, match=refused):
        load_training_state(folder, model, loaded)
    changed = [name for name, t in model.state_dict().items() if not torch.equal(t, kept[name])]
    assert not changed, f"refused, but these weights are already the checkpoint's: {changed[:3]}"
    assert torch.equal(torch.get_rng_state(), rng), "refused, but torch's generator has moved"
    assert not opt.state_dict()["state"], "refused, but the optimizer has a state"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_random_state_of_each_gpu_is_kept():
    state = json.loads(json.dumps(rng_state()))
    expected = torch.randn(5, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), expected)


def test_loading_a_model_does_not_move_the_random_state(run):
    before = torch.get_rng_state()
    load_model(run)
    assert torch.equal(torch.get_rng_state(), before)


def test_python_and_numpy_state_come_back_with_a_resume(run):
    model, opt = build()
    random.seed(1)
    np.random.seed(1)
    save_checkpoint(run / "checkpoints/step_000009", model, ByteTokenizer(), opt)
    expected = random.random(), np.random.rand()
    random.seed(2)
    np.random.seed(2)
    load_training_state(run / "checkpoints/step_000009", model, opt)
    assert (random.random(), np.random.rand()) == expected


def test_threads_versions_and_processes_that_differ_are_said(run):
    model, opt = build()
    state = load_training_state(find_checkpoint(run), model, opt)
    assert state["threads"] == torch.get_num_threads() and state["versions"]["torch"] == torch.__version__
    assert what_differs(state) == []
    state["threads"] = 64
    state["versions"]["torch"] = "1.0"
    threads, processes, version = what_differs(state, world_size=4)
    for line, old, new in (
        (threads, "64", torch.get_num_threads()),
        (processes, "1", 4),
        (version, "1.0", torch.__version__),
    ):
        assert re.search(rf"\b{old}\b.*\b{re.escape(str(new))}\b", line)  # before, then now
    state = load_training_state(find_checkpoint(run), model, opt) | {"dtype": "torch.float32"}
    assert what_differs(state, dtype="torch.float32", device="cpu") == []  # an older state has no device
    [line] = what_differs(state, dtype="torch.bfloat16")
    assert line.startswith("dtype: torch.float32 before, torch.bfloat16 now")


def test_ranks_of_another_number_of_processes_do_not_share_their_dropout(run):
    draws = set()
    for rank in range(3):
        model, opt = build()
        load_training_state(find_checkpoint(run), model, opt, rank, world_size=3)
        draws.add(torch.rand(()).item())
    assert len(draws) == 3


# what is written


class Wrapper(torch.nn.Module):  # as DDP does
    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [compiled, Wrapper, lambda m: Wrapper(compiled(m)), lambda m: compiled(Wrapper(m))]
)
def test_a_compiled_or_wrapped_model_is_saved_under_clean_names_and_resumed_into(tmp_path, wrap):
    model, opt = build()
    wrapped = wrap(model)
    assert unwrap(wrapped) is model
    save_checkpoint(tmp_path / "a", wrapped, ByteTokenizer(), opt)
    save_checkpoint(tmp_path / "b", wrapped, ByteTokenizer(), opt, weights=wrapped.state_dict())
    for name in "ab":
        assert load_file(tmp_path / name / "model.safetensors").keys() == model.state_dict().keys()
    other, opt = build(seed=5)
    load_training_state(tmp_path / "a", wrap(other), opt)
    assert torch.equal(other.wte.weight, model.wte.weight)


def test_a_model_with_a_part_named_module_is_no_wrapper_and_keeps_its_other_parts(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(2, 2)
            self.scale = torch.nn.Parameter(torch.rand(2))

    model = Two()
    assert unwrap(model) is model
    folder = save_checkpoint(tmp_path / "two", model, ByteTokenizer())
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()


def test_weights_that_are_not_the_whole_model_are_refused(tmp_path):
    model, _ = build()
    weights = model.state_dict()
    del weights["h.0.mlp.c_fc.weight"]
    with pytest.raises(UserError, match="h.0.mlp.c_fc.weight"):
        save_checkpoint(tmp_path / "c", model, ByteTokenizer(), weights=weights)
    assert not any(tmp_path.iterdir())


def test_a_tied_head_is_stored_once(tmp_path):
    model, _ = build()
    assert model.config.tie_weights
    save_checkpoint(tmp_path / "c", model, ByteTokenizer())
    stored = load_file(tmp_path / "c/model.safetensors")
    assert tensor_bytes(stored) == sum(p.nbytes for p in model.parameters())
    assert sum(t.shape == model.wte.weight.shape for t in stored.values()) == 1


def test_a_file_that_changes_later_changes_no_open_model(tmp_path):
    "As `cp` does, which writes into the file that is there. A shorter one ended the process (SIGBUS)."
    model, _ = build()
    path = save_checkpoint(tmp_path / "c", model, ByteTokenizer()) / "model.safetensors"
    opened, _, _ = load_model(tmp_path / "c")
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(size))
    for name, weight in model.state_dict().items():
        why = f"{name} changed with the file: `load_file` returns the file itself, so take a copy"
        assert torch.equal(opened.state_dict()[name], weight), why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_stay_in_their_dtype_bit_for_bit(tmp_path, dtype):
    model, _ = build()
    model.to(dtype)
    loaded, _, _ = load_model(save_checkpoint(tmp_path / "c", model, ByteTokenizer()))
    kinds = {p.dtype for p in loaded.parameters()}
    assert kinds == {dtype}, (
        f"saved as {dtype}, loaded as {kinds} (load_state_dict casts, but for assign=True)"
    )
    assert_same_weights(loaded, model)


def test_a_run_is_not_resumed_from_rounded_weights(tmp_path):
    model, opt = build()
    half = {name: t.half() for name, t in model.state_dict().items()}
    save_checkpoint(tmp_path / "c", model, ByteTokenizer(), opt, weights=half)
    with pytest.raises(UserError, match="float16 there, torch.float32 here"):
        load_training_state(tmp_path / "c", model, opt)


def test_a_good_checkpoint_is_never_written_over_and_a_damaged_one_is_replaced(run):
    model, opt = build()
    folder = checkpoints(run)[-1]
    digest = sha256_file(folder / "manifest.json")
    with pytest.raises(FileExistsError):
        save_checkpoint(folder, model, ByteTokenizer(), opt)
    assert verify_checkpoint(folder) == "" and sha256_file(folder / "manifest.json") == digest
    (folder / "optimizer.pt").write_bytes(b"half")
    save_checkpoint(folder, model, ByteTokenizer(), opt)
    assert verify_checkpoint(folder) == "" and sha256_file(folder / "manifest.json") != digest


def broken_disk(path):
    "The files are written, and the last one cannot be brought to disk."
    if path.name == "manifest.json":
        raise OSError("the disk is broken")


def test_overwrite_replaces_a_good_checkpoint_only_once_the_new_one_is_complete(run, monkeypatch):
    model, opt = build()
    folder = checkpoints(run)[-1]
    with pytest.raises(FileExistsError, match="holds a good checkpoint: overwrite=True replaces it"):
        save_checkpoint(folder, model, ByteTokenizer(), opt)
    digest = sha256_file(folder / "manifest.json")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more"):
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("no more")))
        save_checkpoint(folder, model, ByteTokenizer(), opt, overwrite=True)
    assert verify_checkpoint(folder) == "" and sha256_file(folder / "manifest.json") == digest
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is broken"):
        patch.setattr("tinygpt.support._to_disk", broken_disk)
        save_checkpoint(folder, model, ByteTokenizer(), opt, overwrite=True)
    assert verify_checkpoint(folder) == "" and sha256_file(folder / "manifest.json") == digest
    before = sorted(folder.parent.iterdir())
    save_checkpoint(folder, model, ByteTokenizer(), opt, overwrite=True)
    assert verify_checkpoint(folder) == "" and sha256_file(folder / "manifest.json") != digest
    assert sorted(folder.parent.iterdir()) == before
    (folder / "note").write_text("ten years")
    with pytest.raises(FileExistsError, match="holds note"):
        save_checkpoint(folder, model, ByteTokenizer(), opt, overwrite=True)


def test_what_a_killed_save_left_is_removed_by_the_next_and_nothing_else_is(run):
    model, opt = build()
    place = run / "checkpoints"
    for name in (".step_000003.abc_1x.tmp", ".step_000001.removed", ".mine.tmp", ".step_notes"):
        (place / name).mkdir()
        (place / name / "part").write_text("half")
    remove_leftovers(run)  # not the folder they are in
    assert len(list(place.glob(".*"))) == 4
    save_checkpoint(place / "step_000004", model, ByteTokenizer(), opt)
    assert sorted(p.name for p in place.glob(".*")) == [".mine.tmp", ".step_notes"]


def test_an_error_while_writing_leaves_nothing_and_is_not_hidden(run, monkeypatch):
    model, opt = build()
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(run / "checkpoints/step_000004", model, ByteTokenizer(), opt)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.name != "posix" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs root and mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


# fits some times; then the optimizer's file, the weights' file fills the disk
@pytest.mark.parametrize("n_embd", [16, 64, 96, 256])
def test_a_full_disk_loses_nothing_and_is_one_sentence(small_disk, n_embd):
    model, opt = build(GPTConfig.gpt2(**{**SMALL, "n_embd": n_embd}))
    train(model, opt, 0, 1)
    (small_disk / "notes.txt").write_text("keep me")
    run = small_disk / "run"
    said = ""
    for step in range(1, 40):
        try:
            save_checkpoint(run / f"checkpoints/step_{step:06d}", model, ByteTokenizer(), opt, {"step": step})
        except UserError as error:
            said = str(error)
            break
    assert said.startswith("no room for a checkpoint") and "\n" not in said
    assert str(small_disk) in said and "delete old checkpoints" in said
    assert len(checkpoints(run)) == step - 1 and all(verify_checkpoint(c) == "" for c in checkpoints(run))
    assert not list((run).glob("checkpoints/.*")) and (small_disk / "notes.txt").read_text() == "keep me"
    if step > 2:  # what it says works: room is made, and the run goes on
        shutil.rmtree(checkpoints(run)[0])
        save_checkpoint(run / f"checkpoints/step_{step:06d}", model, ByteTokenizer(), opt, {"step": step})


# torch.save says what its zip file says when a write was cut short
@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        RuntimeError("[enforce fail at inline_container.cc:783] . unexpected pos 64 vs 0"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    ],
)
def test_whatever_the_library_says_of_a_disk_that_takes_no_more(error, tmp_path, monkeypatch):
    def full(*args):
        raise error

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(UserError, match="no room for a checkpoint"):
        save_checkpoint(tmp_path / "step_000001", build(GPTConfig.gpt2(**SMALL))[0], ByteTokenizer())
    assert not list(tmp_path.iterdir())


def test_whoever_may_read_a_folder_may_read_all_files_of_a_checkpoint(tmp_path):
    (tmp_path / "ordinary").write_text("")
    folder = save_checkpoint(tmp_path / "step_000001", *build(GPTConfig.gpt2(**SMALL))[:1], ByteTokenizer())
    wanted = (tmp_path / "ordinary").stat().st_mode
    for path in folder.iterdir():
        why = f"{path.name} has permissions {path.stat().st_mode:o}, an ordinary file {wanted:o}"
        assert path.stat().st_mode == wanted, why


# what is opened


def hash_again(folder, name):
    "What somebody does who changes a file of a checkpoint on purpose."
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[name] = sha256_file(folder / name)
    path.write_text(json.dumps(manifest))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_pickle_that_would_run_code_is_not_opened_even_with_a_matching_hash(run, tmp_path, name):
    folder = checkpoints(run)[-1]
    ran = tmp_path / "it ran"
    torch.save({"state": Trap(ran)}, folder / name)
    hash_again(folder, name)
    assert verify_checkpoint(folder) == ""
    model, opt = build()
    with pytest.raises(UserError if name == "optimizer.pt" else Exception):
        load_training_state(folder, model, opt)
    assert not ran.exists()
    torch.save({"state": Trap(ran)}, tmp_path / "trap.pt")
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert ran.exists()  # the trap works


def test_a_checkpoint_without_optimizer_is_refused_in_one_sentence(tmp_path):
    model, opt = build()
    save_checkpoint(tmp_path / "c", model, ByteTokenizer())
    with pytest.raises(UserError, match="optimizer.pt"):
        load_training_state(tmp_path / "c", model, opt)


def test_a_setting_of_a_later_version_is_named(tmp_path):
    model, opt = build()
    folder = save_checkpoint(tmp_path / "c", model, ByteTokenizer(), opt)
    add_settings(folder, n_experts=8)
    with pytest.raises(UserError, match="n_experts"):
        load_model(folder)
    with pytest.raises(UserError, match="n_experts"):
        load_training_state(folder, model, opt)


def add_settings(folder, **more):
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    hash_again(folder, "model.json")


# the best one


@pytest.fixture
def losses(tmp_path):
    "A run whose validation loss goes down, up, down."
    model, opt = build()
    for step, loss in enumerate((3.0, 2.0, 2.6, 2.4, 2.5, None, float("nan")), 1):
        state = {"step": step} if loss is None else {"step": step, "val_loss": loss}
        save_checkpoint(tmp_path / f"r/checkpoints/step_{step:06d}", model, ByteTokenizer(), state=state)
        assert tmp_path / f"r/checkpoints/step_{step:06d}" in prune(tmp_path / "r", keep=2)
    return tmp_path / "r"


def test_the_best_survives_a_loss_that_goes_down_up_down(losses):
    assert [p.name for p in checkpoints(losses)] == ["step_000002", "step_000006", "step_000007"]
    assert find_checkpoint(losses, best=True).name == "step_000002"
    assert find_checkpoint(losses).name == "step_000007"
    assert load_model(losses, best=True)[2].name == "step_000002"


def test_where_no_checkpoint_knows_its_loss_none_is_the_best(losses):
    for folder in checkpoints(losses)[:-2]:  # the newest two do not know theirs
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="validation loss"):
        find_checkpoint(losses, best=True)


def test_of_equally_good_ones_the_oldest_is_best_and_a_damaged_best_gives_way(tmp_path, capsys):
    model, _ = build()
    for step, loss in enumerate((2.0, 1.0, 1.0, 4.0), 1):
        save_checkpoint(
            tmp_path / f"checkpoints/step_{step}", model, ByteTokenizer(), state={"val_loss": loss}
        )
    assert [p.name for p in rank_by_loss(tmp_path)] == ["step_2", "step_3", "step_1", "step_4"]
    (tmp_path / "checkpoints/step_2/model.safetensors").write_bytes(b"no")
    assert find_checkpoint(tmp_path, best=True).name == "step_3" and "step_2" in capsys.readouterr().out


def test_bytes_are_counted_by_the_size_of_each_kind_of_number():
    tree = {"a": [torch.zeros(3, dtype=torch.float64), {"b": torch.zeros(2, dtype=torch.int8)}], "c": 5}
    assert tensor_bytes(tree) == 3 * 8 + 2


def test_keeping_none_is_refused(run):
    with pytest.raises(UserError, match="keep = 0"):
        prune(run, 0)
    assert len(checkpoints(run)) == 3


def test_the_removed_are_gone_before_they_are_deleted(run, monkeypatch):
    import tinygpt.checkpoint as module

    def killed(path, **kw):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(run, 1)
    monkeypatch.undo()
    assert [p.name for p in checkpoints(run)] == ["step_000002", "step_000003"]
    assert (run / "checkpoints/.step_000001.removed").exists()
    prune(run, 1)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000003"]


def hurt(folder):
    (folder / "model.safetensors").write_bytes(b"damaged")


def steps(run):
    return [int(p.name[5:]) for p in checkpoints(run)]


def test_a_damaged_newest_one_costs_no_good_one(run):
    "The run went on from step 2, and saves step 4 while a damaged step 9 lies there."
    model, opt = build()
    (run / "checkpoints/step_000003").rename(run / "checkpoints/step_000009")
    hurt(run / "checkpoints/step_000009")
    save_checkpoint(run / "checkpoints/step_000004", model, ByteTokenizer(), opt)
    prune(run, 1)
    assert steps(run) == [4, 9] and find_checkpoint(run).name == "step_000004"
    save_checkpoint(run / "checkpoints/step_000009", model, ByteTokenizer(), opt)  # the run gets there
    prune(run, 1)
    assert steps(run) == [9] and verify_checkpoint(run / "checkpoints/step_000009") == ""


def test_only_good_ones_count_as_kept_and_where_none_is_good_none_is_removed(run):
    hurt(run / "checkpoints/step_000002")
    assert steps(run) == [1, 2, 3] and len(prune(run, 2)) == 2 and steps(run) == [1, 3]
    for folder in checkpoints(run):
        hurt(folder)
    prune(run, 1)
    assert steps(run) == [1, 3]


def test_no_more_is_verified_than_stays(run, monkeypatch):
    import tinygpt.checkpoint as module

    seen = []
    real = module.verify_checkpoint
    monkeypatch.setattr(module, "verify_checkpoint", lambda f, *how: seen.append(f.name) or real(f, *how))
    prune(run, 3)
    assert seen == []  # nothing to remove
    prune(run, 1)
    assert seen == ["step_000003"]


def test_a_run_that_saves_often_reads_each_checkpoint_once_and_a_changed_one_again(tmp_path, monkeypatch):
    import tinygpt.data.tokens as module

    seen = []
    real = module.sha256_file
    for place in (module, checkpoint_module):
        monkeypatch.setattr(place, "sha256_file", lambda path: seen.append(path) or real(path))
    for step in range(1, 9):
        state = {"val_loss": abs(step - 3.5)}
        save_checkpoint(tmp_path / f"checkpoints/step_{step}", build()[0], ByteTokenizer(), state=state)
        prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 7, 8]
    assert len(seen) == len(set(seen)) > 0
    hurt(tmp_path / "checkpoints/step_8")
    assert steps(tmp_path) == [3, 7, 8] and len(prune(tmp_path, 1)) == 3  # the damaged newest one stays
    assert {path.parent.name for path in seen if seen.count(path) > 1} == {"step_8"}


def test_a_loss_that_was_learned_after_saving_counts_as_one_that_was_saved(tmp_path):
    for step, loss in ((1, 2.0), (2, None), (3, 1.5)):
        folder = tmp_path / f"checkpoints/step_{step}"
        save_checkpoint(folder, build()[0], ByteTokenizer(), state=dict(val_loss=loss))
    assert [p.name for p in rank_by_loss(tmp_path)] == ["step_3", "step_1"]
    (tmp_path / "checkpoints/step_2/val_loss.json").write_text('{"val_loss": 1.0}')
    assert [p.name for p in rank_by_loss(tmp_path)] == ["step_2", "step_3", "step_1"]
    assert find_checkpoint(tmp_path, best=True).name == "step_2"
    (tmp_path / "checkpoints/step_2/val_loss.json").write_text('{"val_')  # killed while it was written
    assert find_checkpoint(tmp_path, best=True).name == "step_3"


def test_a_damaged_best_one_gives_way_to_the_next_best(losses):
    hurt(losses / "checkpoints/step_000002")
    save_checkpoint(losses / "checkpoints/step_000008", build()[0], ByteTokenizer(), state={"val_loss": 9.0})
    prune(losses, 1)
    assert steps(losses) == [8]


class Plain(torch.nn.Module):
    "A module of somebody's, without a config: a tied weight, a buffer of whole numbers."

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.b(self.a(x)))


def test_any_module_is_saved_and_resumed_and_load_model_says_what_it_is(tmp_path):
    def step(module, opt):
        opt.zero_grad()
        loss = module(torch.randn(8, 4)).square().mean()
        loss.backward()
        opt.step()
        return loss.item()

    torch.manual_seed(0)
    module = Plain()
    opt = torch.optim.AdamW(module.parameters())
    step(module, opt)
    folder = save_checkpoint(tmp_path / "c", module, ByteTokenizer(), opt, {"step": 1})
    assert verify_checkpoint(folder) == "" and not (folder / "model.json").exists()
    expected = [step(module, opt) for _ in range(3)]
    other = Plain()
    opt = torch.optim.AdamW(other.parameters())
    assert load_training_state(folder, other, opt)["step"] == 1
    assert [step(other, opt) for _ in range(3)] == expected and other.a.weight is other.b.weight
    with pytest.raises(UserError, match="a module that is not tinygpt's GPT.*load_training_state"):
        load_model(folder)
    with pytest.raises(UserError, match="weights of another model"):
        load_training_state(folder, torch.nn.Linear(4, 4))


def test_a_refused_pickle_does_not_advise_to_open_it_in_the_way_that_runs_code(run, tmp_path):
    folder = checkpoints(run)[-1]
    torch.save({"state": Trap(tmp_path / "ran")}, folder / "optimizer.pt")
    with pytest.raises(UserError) as error:
        load_training_state(folder, *build())
    said = str(error.value)
    assert "weights_only" not in said and "more than tensors" in said and "it would call" in said
    (folder / "optimizer.pt").write_bytes(b"")
    with pytest.raises(UserError, match="is damaged, or not a file that torch.save wrote"):
        load_training_state(folder, *build())


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path):
    states = []
    expected = []
    for rank in range(3):
        torch.manual_seed(100 + rank)
        states.append(rng_state())
        expected.append(torch.rand(3))
    model, opt = build()
    save_checkpoint(tmp_path / "c", model, ByteTokenizer(), opt, {"step": 0, "rng": states})
    for rank in (2, 0, 1):
        load_training_state(tmp_path / "c", model, opt, rank=rank, world_size=3)
        drawn = torch.rand(3)
        whose = [r for r in range(3) if torch.equal(drawn, expected[r])]
        assert whose == [rank], f"rank {rank} of 3 draws the numbers of ranks {whose}"


def test_a_loss_that_is_not_finite_leaves_a_state_that_is_json_and_is_no_candidate_for_best(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for step, loss in ((1, 2.0), (2, float("nan")), (3, float("-inf"))):
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        save_checkpoint(folder, build()[0], ByteTokenizer(), state=dict(step=step, val_loss=loss))
        state = json.loads((folder / "state.json").read_text(), parse_constant=refuse)
        assert state["val_loss"] == (loss if step == 1 else None)
        if step == 2:  # as older versions wrote it
            (folder / "state.json").write_text('{"val_loss": NaN}')
    assert [p.name for p in rank_by_loss(tmp_path)] == ["step_000001"]


@pytest.mark.parametrize("what", ["a folder of theirs", "a run", "a file", "a checkpoint with a note"])
def test_what_is_no_checkpoint_is_not_removed_by_a_save_over_it(what, tmp_path):
    "A folder without a manifest passed for a damaged checkpoint: a save into it removed all that it held."
    model, folder = build()[0], tmp_path / "there"
    kept = {
        "a folder of theirs": "thesis.txt",
        "a run": "checkpoints/step_1/state.json",
        "a checkpoint with a note": "note",
    }
    if what == "a file":
        file = folder
    else:
        file = folder / kept[what]
        if what == "a checkpoint with a note":
            save_checkpoint(folder, model, ByteTokenizer())
            (folder / "manifest.json").unlink()
        file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("ten years")
    with pytest.raises(FileExistsError, match="exists and holds"):
        save_checkpoint(folder, model, ByteTokenizer())
    assert file.read_text() == "ten years"


def test_an_empty_folder_is_no_obstacle(tmp_path):
    assert verify_checkpoint(save_checkpoint(tmp_path, build()[0], ByteTokenizer())) == ""
