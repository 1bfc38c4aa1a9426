"""Documents that share a row and do not see each other: in the model, in training, wherever it is judged."""

import json
import pickle
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.accumulate_memory import ChunkedLossGPT, checkpoint_blocks
from tinygpt.checkpoint import checkpoints, load_model
from tinygpt.data.tokens import sha256_file
from tinygpt.ddp.world import run_processes
from tinygpt.document_masks import Apart, document_mask, document_numbers, was_masked
from tinygpt.evaluate.__main__ import main as evaluate_main
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.config import load_config
from tinygpt.run.setup import next_token_loader, open_run, score_run
from tinygpt.run.stage import config_after
from tinygpt.support import UserError
from tinygpt.tokenizer_hf import NanoChars
from tinygpt.train import losses_of, main, train

EOT, T = 19, 24
FORMS = {
    "llama": GPTConfig.llama(n_kv_head=2, vocab_size=20, block_size=T, n_layer=3, n_head=4, n_embd=32),
    "modern": GPTConfig.modern(vocab_size=20, block_size=T, n_layer=3, n_head=4, n_embd=32),
    "tables": GPTConfig.llama(vocab_size=20, block_size=T, n_layer=2, n_head=2, n_embd=32, ngram_rows=37),
}


def loud(config, **how):
    "A model in float64 with weights far from the small first ones: attention has a say."
    model = GPT(config, **how).double()
    if config.position == "rope":  # the model's own angles are rounded to float32
        speed = 10000.0 ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angle = torch.arange(config.block_size).double()[:, None] * speed
        model.rope = torch.stack((angle.cos(), angle.sin()))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    return model


def pieces_of(row, eot=EOT):
    "The documents of a row, (first place, place behind) each, found with a loop over its tokens."
    starts = [0, *(i for i, token in enumerate(row) if token == eot and i > 0), len(row)]
    return list(zip(starts, starts[1:]))


def alone_sum(model, x, y, eot=EOT):
    "The sum of the losses by torch's own functions, each document of each row in a forward of its own."
    total = 0
    for row, targets in zip(x, y):
        for a, b in pieces_of(row.tolist(), eot):
            logits = model(row[None, a:b])[0][0]
            total = total + F.cross_entropy(logits, targets[a:b], ignore_index=-100, reduction="sum")
    return total


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


rows = st.lists(st.integers(0, EOT), min_size=T + 1, max_size=T + 1) | st.lists(
    st.sampled_from([3, 7, EOT]), min_size=T + 1, max_size=T + 1
)


@settings(max_examples=30)
@given(
    form=st.sampled_from(list(FORMS)),
    impl=st.sampled_from(["naive", "fused"]),
    ids=st.lists(rows, min_size=1, max_size=2),
    way=st.sampled_from(["plain", "in pieces", "computed again"]),
)
def test_a_row_is_the_documents_in_it_each_by_itself_logits_loss_and_gradient(form, impl, ids, way):
    model = loud(FORMS[form], attn_impl=impl)
    ids = torch.tensor(ids)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[:, 5] = -100
    for row, logits in zip(x, Apart(model, EOT)(x)[0]):
        for a, b in pieces_of(row.tolist()):
            torch.testing.assert_close(logits[a:b], model(row[None, a:b])[0][0], rtol=1e-9, atol=1e-9)
    wanted = alone_sum(model, x, y)
    wanted_gradient = gradients(model, wanted)
    trained = {"in pieces": ChunkedLossGPT(model, 7), "computed again": checkpoint_blocks(model)}.get(
        way, model
    )
    loss = Apart(trained, EOT)(x, y, reduction="sum")[1]
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(model, loss), wanted_gradient, rtol=1e-8, atol=1e-8)
    mean = Apart(model, EOT)(x, y)[1]
    torch.testing.assert_close(mean, wanted / (y != -100).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["gpt2", "llama", "modern"])
def test_nothing_of_a_document_reaches_the_next_one_with_tables_of_ngrams_either(form):
    config = getattr(GPTConfig, form)(vocab_size=20, block_size=8, n_layer=2, n_head=2, n_embd=32)
    model = loud(replace(config, ngram_rows=128))
    one, other = torch.tensor([[1, 2, 3, EOT, 4, 5, 6, 7], [9, 8, 11, EOT, 4, 5, 6, 7]])
    seen, moved = (Apart(model, EOT)(row[None])[0][0, 3:] for row in (one, other))
    assert torch.equal(seen, moved)
    mixed, moved = (model(row[None])[0][0, 3:] for row in (one, other))
    assert (mixed - moved).abs().amin(dim=1).min() > 0  # without the mask all of it does


def test_an_eot_is_the_first_token_of_its_document_and_does_not_see_the_one_before():
    ids = torch.tensor([[4, EOT, EOT, 5, 6, EOT]])
    assert document_numbers(ids, EOT).tolist() == [[0, 1, 2, 2, 2, 3]]
    seen = document_mask(ids, EOT).tril()[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [1], [2], [2, 3], [2, 3, 4], [5]]


def test_a_compiler_sees_one_graph_and_learned_positions_stay_those_of_the_row():
    model = loud(GPTConfig.gpt2(vocab_size=20, block_size=T, n_layer=2, n_head=2, n_embd=32))
    ids = torch.randint(20, (3, T), generator=torch.Generator().manual_seed(1))
    ids[:, ::7] = EOT
    eager = Apart(model, EOT)(ids, ids)[1]
    whole = torch.compile(Apart(model, EOT).__call__, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(ids, ids)[1], eager, rtol=0, atol=0)
    a, b = pieces_of(ids[0].tolist())[1]
    together, moved = Apart(model, EOT)(ids)[0][0, a:b], model(ids[:1, a:b])[0][0]
    assert (together - moved).abs().max() > 0.1
    model.wpe.weight.data[: b - a] = model.wpe.weight.data[a:b].clone()  # the places that it has in the row
    torch.testing.assert_close(model(ids[:1, a:b])[0][0], together, rtol=1e-9, atol=1e-9)


def test_all_else_of_a_model_that_keeps_documents_apart_is_the_models():
    model = loud(FORMS["llama"]).eval()
    apart = Apart(model, EOT)
    assert apart.config is model.config and not apart.training
    apart.train()
    assert model.training and next(apart.parameters()) is next(model.parameters())
    assert apart.eval() is apart and not model.training  # or `.eval()` would take the mask off
    assert apart.train() is apart and model.training
    assert apart.train(False) is apart and not model.training
    with pytest.raises(AttributeError):
        apart.nothing  # noqa: B018
    assert pickle.loads(pickle.dumps(apart)).eot == EOT


@pytest.fixture
def short(config, tmp_path):
    "A run on documents of 3 to 40 bytes, in rows of 64."
    draw = random.Random(0)
    lines = ["".join(draw.choices("abcd ", k=draw.randint(3, 40))) for _ in range(600)]
    path = tmp_path / "short.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    config.data = replace(config.data, source=str(path), separator="\n", mask_documents=True)
    config.model = GPTConfig.llama(vocab_size=257, block_size=64, n_layer=2, n_head=2, n_embd=32)
    config.optim = replace(config.optim, max_steps=6, learning_rate=3e-3, warmup_steps=1)
    config.system = replace(config.system, compile="off")
    config.eval = replace(config.eval, final_eval_tokens=100_000, eval_every=3, save_every=3)
    return config


def quiet(config, **how):
    return train(config, progress="none", **how)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def log_of(result):
    return (result.run / "log.txt").read_text()


@pytest.mark.parametrize(
    "system, rows", [({}, None), (dict(loss_chunk=50), 1), (dict(checkpoint_activations=True), 3)]
)
def test_the_trainers_first_loss_is_the_mean_over_documents_alone(short, system, rows):
    short.system = replace(short.system, **system)
    short.data = replace(short.data, micro_batch_size=rows)
    short.optim = replace(short.optim, max_steps=1, warmup_steps=0)
    with torch.no_grad():
        run = open_run(short)
        x, y = next(next_token_loader(run))
        model = run.model.double()
        assert (x == 256).sum() > 2 * len(x)
        wanted, plain = alone_sum(model, x, y, 256) / y.numel(), model(x, y)[1]
        run.close()
    [loss] = quiet(short, overwrite=True).losses
    assert loss == pytest.approx(wanted.item(), abs=2e-6)
    assert abs(plain - wanted) > 1e-5  # without the mask it is another one


def test_a_run_is_judged_as_it_was_trained_on_the_way_at_the_end_and_by_the_commands(short, capsys):
    result = quiet(short)
    tokens, block = np.asarray(result.data.val).astype(np.int64), 64
    starts = range(0, len(tokens) - 1, block)
    with torch.no_grad():
        pairs = [torch.tensor(tokens[i : i + block + 1]) for i in starts]
        total = sum(alone_sum(result.model.eval(), p[None, :-1], p[None, 1:], 256) for p in pairs)
        plain = sum(result.model(p[None, :-1], p[None, 1:], reduction="sum")[1] for p in pairs)
    wanted = total.item() / (len(tokens) - 1)
    assert result.val.loss == pytest.approx(wanted, abs=1e-5)
    assert abs(plain.item() / (len(tokens) - 1) - wanted) > 1e-4
    lines = [line for line in log_of(result).splitlines() if "validation loss" in line]
    assert len(lines) >= 2 and all(line.endswith("tokens, documents masked") for line in lines)
    assert "documents that share a row do not see each other" in log_of(result)
    assert "tokens, documents masked" in (result.run / "report.md").read_text()
    state = json.loads((checkpoints(result.run)[-1] / "state.json").read_text())
    assert state["val_loss"] == pytest.approx(result.val.loss, abs=0.1) and state["mask_documents"] is True

    _, again = score_run(load_config(result.run / "config.json"), resume=True)
    assert again.loss == pytest.approx(wanted, abs=1e-5)
    assert capsys.readouterr().out.count(", documents masked\n") == 2
    assert evaluate_main([str(result.run), "--device", "cpu"]) == 0
    assert ", documents masked\n" in capsys.readouterr().out
    [found] = json.loads((result.run / "eval.json").read_text())
    assert found["loss"] == pytest.approx(wanted, abs=1e-5) and found["mask_documents"] is True


def test_a_checkpoint_that_stands_alone_and_weights_to_begin_with_know_how_they_were_trained(
    short, tmp_path, capsys
):
    result = quiet(short)
    copy = shutil.copytree(checkpoints(result.run)[-1], tmp_path / "copy")
    assert was_masked(copy) and not was_masked(tmp_path)
    assert evaluate_main([str(copy), "--data", short.data.source, "--device", "cpu"]) == 0
    assert "documents masked" in capsys.readouterr().out
    assert config_after(str(copy), "chat", 8).data.mask_documents

    later = replace(short, run=replace(short.run, name="later", init_from=str(copy)))
    later.data = replace(short.data, tokenizer="bpe", mask_documents=False)
    _, score = score_run(later)
    assert score.loss == pytest.approx(result.val.loss, abs=1e-5)
    begun = quiet(later)
    assert (
        "mask_documents is off, but the weights of init_from were trained with it: --mask-documents"
        in log_of(begun)
    )
    assert not was_masked(checkpoints(begun.run)[-1]) and "documents masked" not in log_of(begun)


def test_a_stopped_run_goes_on_to_the_bit_and_not_with_another_mask(short, capsys):
    whole = quiet(short)
    for folder in checkpoints(whole.run)[1:]:
        shutil.rmtree(folder)
    for flag in ("--no-mask-documents", "--mask-documents"):
        config = json.loads((whole.run / "config.json").read_text())
        config["data"]["mask_documents"] = flag == "--no-mask-documents"
        (whole.run / "config.json").write_text(json.dumps(config))
        if flag == "--no-mask-documents":  # the run has it, the flag takes it away
            assert main(["--resume", str(whole.run), flag]) == 2
            told = "mask_documents = False, but the run began with True: leave the flag out"
            assert told in capsys.readouterr().err
    config["data"]["mask_documents"] = True
    (whole.run / "config.json").write_text(json.dumps(config))
    again = quiet(short, resume=True)
    assert torch.equal(weights(whole.model), weights(again.model)) and again.val == whole.val
    assert again.losses == whole.losses[-len(again.losses) :]


def test_a_run_from_before_the_setting_goes_on_without_it(short):
    short.data = replace(short.data, mask_documents=False)
    run = quiet(short).run
    for folder in checkpoints(run):
        state = json.loads((folder / "state.json").read_text())
        assert state.pop("mask_documents") is False
        (folder / "state.json").write_text(json.dumps(state))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["state.json"] = sha256_file(folder / "state.json")
        (folder / "manifest.json").write_text(json.dumps(manifest))
    config = json.loads((run / "config.json").read_text())
    del config["data"]["mask_documents"]
    (run / "config.json").write_text(json.dumps(config))
    assert not load_config(run / "config.json").data.mask_documents
    assert quiet(short, resume=True).finished
    short.data = replace(short.data, mask_documents=True)
    with pytest.raises(UserError, match="mask_documents = True, but the run began with False"):
        quiet(short, resume=True)


@pytest.mark.parametrize("loader", ["random", "shard", "stream"])
def test_on_a_text_of_one_document_the_mask_changes_no_bit_and_the_log_says_so(short, words, loader):
    short.data = replace(short.data, source=str(words), separator="", loader=loader)
    masked = quiet(short)
    short.run.name, short.data = "plain", replace(short.data, mask_documents=False)
    plain = quiet(short)
    assert masked.losses == plain.losses and torch.equal(weights(masked.model), weights(plain.model))
    assert masked.val == plain.val
    assert "mask_documents changes nothing: the training text is one document" in log_of(masked)
    assert "mask_documents" not in log_of(plain)


@pytest.mark.parametrize("loader", ["shard", "stream"])
def test_a_text_of_many_documents_trains_differently_with_the_mask(short, loader):
    short.data = replace(short.data, loader=loader)
    masked = quiet(short)
    assert "changes nothing" not in log_of(masked)
    short.run.name, short.data = "plain", replace(short.data, mask_documents=False)
    assert not torch.equal(weights(masked.model), weights(quiet(short).model))


@pytest.mark.parametrize("attention", ["tiled", "triton"])
def test_an_attention_that_takes_no_mask_is_refused_in_one_sentence(short, attention):
    short.system = replace(short.system, attention=attention)
    with pytest.raises(UserError, match=f"attention = {attention} does not go with mask_documents"):
        quiet(short)
    assert not short.folder.exists()


def test_a_tokenizer_without_an_end_of_text_is_refused_in_one_sentence(short, tmp_path):
    NanoChars("\n abcd").save(tmp_path / "chars.json")  # nanoGPT's: a line end stands between documents
    short.data = replace(short.data, tokenizer=str(tmp_path / "chars.json"))
    with pytest.raises(UserError, match="the tokenizer of .*short.txt has no end of text: leave --mask-doc"):
        quiet(short)
    assert not short.folder.exists()


@pytest.mark.parametrize("every, told", [(5000, True), (40, False)])
def test_in_files_that_do_not_count_their_documents_an_end_of_text_is_looked_for(
    short, tmp_path, every, told
):
    ids = np.arange(4000, dtype=np.uint16) % 60
    ids[7::every] = 256
    if told:
        ids[7] = 1
    for split in ("train", "val"):  # nanoGPT's
        ids.tofile(tmp_path / f"{split}.bin")
    short.data = replace(short.data, source=str(tmp_path), tokenizer="byte", separator="")
    short.optim = replace(short.optim, max_steps=1, warmup_steps=0)
    assert ("mask_documents changes nothing" in log_of(quiet(short))) == told


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero", "fsdp"])
def test_two_processes_make_the_run_of_one(short, parallel):
    short.data = replace(short.data, micro_batch_size=1)
    short.optim = replace(short.optim, optimizer="adamw")
    alone = quiet(short)
    short.run.name = parallel
    saving = dict(checkpoint_activations=True, loss_chunk=0 if parallel == "fsdp" else 20)
    short.system = replace(short.system, parallel=parallel, **saving)
    for losses in run_processes(losses_of, 2, short, timeout=240):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
    spread, _, folder = load_model(short.folder)
    torch.testing.assert_close(weights(spread), weights(alone.model), rtol=1e-3, atol=1e-4)
    judged = [
        json.loads((checkpoints(run)[-1] / "state.json").read_text()) for run in (alone.run, short.folder)
    ]
    assert was_masked(folder) and judged[0]["val_loss"] == pytest.approx(judged[1]["val_loss"], abs=1e-4)
