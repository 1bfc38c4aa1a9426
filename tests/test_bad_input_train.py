"""What a person can get wrong on the way to a training run, one line a case.

(what is wrong, the words of the command, a word that the sentence has to hold)
"""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from bad_input import assert_refused

from tinygpt.data.tokens import Corpus, write_token_data
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer
from tinygpt.train import main

QUICK = "--n-layer 1 --n-embd 16 --n-head 2 --block-size 16 --ngram-rows 8 --max-steps 4 --eval-every 0"
QUICK += " --save-every 0 --eval-tokens 50 --final-eval-tokens 50 --sample-tokens 0 --no-compressors"
QUICK += " --device cpu --compile off --batch-size 4"
BYTES = "--data text.txt --tokenizer byte " + QUICK
CHARS = "--data greek.txt --tokenizer char " + QUICK

NUMBERS = [
    ("a rate beyond float32", "--learning-rate 1e300", "learning_rate = 1e+300 is too large"),
    ("a rate without end", "--learning-rate inf", "learning_rate"),
    ("a rate that is no number", "--learning-rate nan", "learning_rate"),
    ("a rate below zero", "--learning-rate -1", "learning_rate = -1.0 is too small"),
    ("a word for a rate", "--learning-rate fast", "fast"),
    ("Muon's rate beyond float32", "--muon-lr 1e300", "muon_lr"),
    ("Muon's rate below zero", "--muon-lr -0.1", "muon_lr"),
    ("a decay that turns weights around", "--weight-decay 1e30", "weight_decay"),
    ("a decay below zero", "--weight-decay -0.1", "weight_decay"),
    ("a decay that is no number", "--weight-decay nan", "weight_decay"),
    ("Muon's decay too large", "--muon-weight-decay 1e30", "muon_weight_decay"),
    ("Muon's momentum without end", "--muon-momentum 1", "muon_momentum = 1.0 must be"),
    ("Muon's momentum below zero", "--muon-momentum -0.1", "muon_momentum = -0.1 must be"),
    ("embeddings that go uphill", "--embedding-lr-multiplier -1", "embedding_lr_multiplier = -1.0 is too"),
    ("eps 0, which divides 0 by 0", "--eps 0", "eps = 0.0 is too small"),
    ("eps that float32 takes for 0", "--eps 1e-300", "eps = 1e-300"),
    ("eps below zero", "--eps -1", "eps"),
    ("eps larger than any gradient", "--eps 1e30", "eps"),
    ("eps that is no number", "--eps nan", "eps"),
    ("clip below zero", "--clip -1", "clip"),
    ("clip without end", "--clip inf", "clip"),
    ("a beta of 1", "--betas 0.9 1.0", "betas"),
    ("a beta below zero", "--betas -0.1 0.9", "betas"),
    ("a beta that is no number", "--betas nan 0.9", "betas"),
    ("one beta", "--betas 0.9", "betas"),
    ("no rows", "--batch-size 0", "batch_size = 0"),
    ("rows below zero", "--batch-size -4", "batch_size = -4"),
    ("a hundred billion rows", "--batch-size 100000000000", "batch_size = 100000000000 is too large"),
    ("rows beyond int64", "--batch-size 100000000000000000000", "batch_size"),
    ("half a row", "--batch-size 1.5", "1.5"),
    ("a step beyond the memory", "--batch-size 1000000 --block-size 100000", "bytes"),
    ("no micro-rows", "--micro-batch-size 0", "micro_batch_size = 0"),
    ("more micro-rows than rows", "--micro-batch-size 9999", "micro_batch_size = 9999"),
    ("no steps", "--max-steps 0", "max_steps = 0"),
    ("steps below zero", "--max-steps -3", "max_steps = -3"),
    ("a trillion steps", "--max-steps 1000000000000", "max_steps"),
    ("half a step", "--max-steps 0.5", "0.5"),
    ("no layer", "--n-layer 0", "n_layer = 0"),
    ("a million layers", "--n-layer 1000000", "n_layer = 1000000 is too large"),
    ("layers beyond the memory", "--n-layer 1000 --n-embd 57600", "bytes"),
    ("a width beyond the memory", "--n-embd 960000", "bytes"),
    ("a width beyond all bounds", "--n-embd 60000000", "n_embd = 60000000 is too large"),
    ("heads that do not divide", "--n-head 5", "n_head = 5"),
    ("no heads", "--n-head 0", "n_head = 0"),
    ("key heads that do not divide", "--n-kv-head 4", "n_kv_head = 4"),
    ("no vocabulary", "--vocab-size 0", "vocab_size = 0"),
    ("a vocabulary of 10^12", "--vocab-size 1000000000000", "vocab_size"),
    ("a vocabulary beyond the memory", "--vocab-size 2000000000", "bytes"),
    ("tables below zero", "--ngram-rows -1", "ngram_rows = -1"),
    ("tables of 10^12 rows", "--ngram-rows 1000000000000", "ngram_rows"),
    ("tables beyond the memory", "--ngram-rows 2000000000", "bytes"),
    ("no context", "--block-size 0", "block_size = 0"),
    ("a context of 10^12", "--block-size 1000000000000", "block_size"),
    ("an MLP below zero", "--mlp-hidden -1", "mlp_hidden = -1"),
    ("an MLP of 10^12", "--mlp-hidden 1000000000000", "mlp_hidden"),
    ("everything dropped", "--dropout 1.0", "dropout = 1.0"),
    ("dropout below zero", "--dropout -0.1", "dropout"),
    ("dropout that is no number", "--dropout nan", "dropout"),
    ("a seed below zero", "--seed -1", "seed = -1"),
    ("a seed of 31 digits", "--seed 1000000000000000000000000000000", "seed"),
    ("threads below zero", "--threads -1", "threads = -1"),
    ("a hundred thousand threads", "--threads 100000", "threads = 100000 is too large"),
    ("pieces of the loss below zero", "--loss-chunk -1", "loss_chunk = -1"),
    ("validations below zero", "--eval-every -1", "eval_every = -1"),
    ("a validation of nothing", "--eval-tokens 0", "eval_tokens = 0"),
    ("a last validation of nothing", "--final-eval-tokens 0", "final_eval_tokens = 0"),
    ("a sample below zero", "--sample-tokens -1", "sample_tokens = -1"),
    ("a sample of 10^9 tokens", "--sample-tokens 1000000000", "sample_tokens"),
    ("no reading", "--log-every 0", "log_every = 0"),
    ("saves below zero", "--save-every -1", "save_every = -1"),
    ("nothing kept", "--keep 0", "keep = 0"),
    ("a warm-up below zero", "--warmup-steps -1", "warmup_steps = -1"),
    ("a warm-up that was asked for, beyond the end", "--warmup-steps 50 --max-steps 10", "warmup_steps = 50"),
    ("a last rate above the first", "--final-lr 2", "final_lr = 2.0"),
    ("a last rate that is no number", "--final-lr nan", "final_lr"),
    ("a way down longer than the run", "--cooldown 2", "cooldown = 2.0"),
]

NAMES = [
    ("the folder above", "--name ..", "name = '..'"),
    ("the folder above, to be deleted", "--name .. --overwrite", "name = '..'"),
    ("the folder itself", "--name .", "name = '.'"),
    ("three dots", "--name ...", "name = '...'"),
    ("no name", "--name ''", "name = ''"),
    ("the home", "--name '~'", "name = '~'"),
    ("somebody's home", "--name '~root'", "name = '~root'"),
    ("two components", "--name a/b", "name = 'a/b'"),
    ("a path from the root", "--name /tmp/x", "name = '/tmp/x'"),
    ("a way out", "--name ../x", "name = '../x'"),
    ("a path of Windows", r"--name 'a\b'", "no slashes"),
    ("a line break", "--name 'a\nb'", r"a\nb"),
    ("a bell", "--name 'a\ab'", r"a\x07b"),
    ("NUL", "--name 'a\0b'", "name = 'a\\x00b'"),
    ("300 characters", f"--name {'x' * 300}", "at most 200 bytes"),
    ("100 characters of 3 bytes", f"--name {'漢' * 100}", "at most 200 bytes"),
    ("a blank at the end", "--name 'a '", "name = 'a '"),
    ("a blank at the beginning", "--name ' a'", "name = ' a'"),
    ("what looks like a flag", "--name=-rf", "name = '-rf'"),
    ("half of a surrogate pair", "--name a\ud800", "not plain text"),
    ("runs in no place", "--out ''", "out = ''"),
    ("runs in a device", "--out /dev/null", "/dev/null is not a folder"),
    ("runs in a file", "--out text.txt", "text.txt is not a folder"),
    ("runs below a file", "--out text.txt/deep/er", "text.txt is not a folder"),
    ("runs in what looks like a flag", "--out=-rf", "out = '-rf'"),
    ("runs in the home of nobody", "--out '~no-such-user-1/x'", "no-such-user-1"),
    ("runs in a name of 300 characters", f"--out {'x' * 300}", "File name too long"),
    ("runs in a place of 5000 characters", f"--out {'x/' * 2500}", "4000 characters"),
    ("runs in NUL", "--out 'a\0b'", "NUL"),
]

TEXTS = [
    ("a prompt of half a surrogate pair", BYTES + " --prompt a\ud800", "prompt"),
    ("a prompt with NUL", BYTES + " --prompt 'a\0b'", "NUL"),
    ("a prompt of 5000 characters", BYTES + f" --prompt {'x' * 5000}", "4000 characters"),
    ("a prompt that the characters lack", CHARS + " --prompt sing", "prompt = 'sing' cannot be encoded"),
    ("no such corpus", "--data nowhere.txt", "nowhere.txt"),
    ("a corpus of half a surrogate pair", "--data a\ud800", "source"),
    ("a corpus with NUL", "--data 'a\0b'", "source"),
    ("an empty text", "--data empty.txt", "empty.txt is empty"),
    ("a text in Latin-1", "--data latin.txt", "UTF-8"),
    ("a text shorter than a block", "--data short.txt --tokenizer byte", "fewer than one block"),
    ("a vocabulary larger than the text gives", "--data short.txt", "4096"),
    ("a folder without texts", "--data nothing", "no .txt file"),
    ("token files cut off", "--data cut", "train.bin"),
    ("documents for the loader of windows", "--data documents.jsonl", "not plain text"),
    ("documents with another field", "--data other.jsonl --loader stream --tokenizer byte", "--text-key"),
    ("no such field", "--data documents.jsonl --loader stream --tokenizer byte --text-key txt", "'txt'"),
    ("no such tokenizer", "--data text.txt --tokenizer nope", "tokenizer = nope"),
    ("a tokenizer that is a text", "--data text.txt --tokenizer text.txt", "give the file of a tokenizer"),
    ("weights that are nowhere", BYTES + " --init-from nowhere", "nowhere"),
    ("weights in an empty folder", BYTES + " --init-from nothing", "nothing"),
    (
        "another tokenizer than the weights'",
        BYTES + " --init-from runs/done --tokenizer char",
        "give --tokenizer",
    ),
    ("weights of another form", BYTES + " --init-from runs/done --n-layer 9", "leave --n-layer out"),
]

FLAGS = [
    ("an unknown preset", "laptob", "preset = laptob is not known"),
    ("a flag with a slip", "--blok-size 3", "--block-size"),
    ("a flag nobody knows", "--zzz 3", "--zzz is not a setting"),
    ("a word too many", "laptop shakespeare", "shakespeare"),
    ("a switch with False", "--compressors False", "say --no-compressors"),
    ("a switch with =false", "--compressors=false", "say --no-compressors"),
    ("a switch with true", "--overwrite true", "say --overwrite"),
    ("a switch with 0", "--tied-weights 0 --tie-weights 0", "say --no-tie-weights"),
    ("a switch with an underscore", "--checkpoint_activations False", "say --no-checkpoint-activations"),
    ("a value that is missing", "--max-steps", "max-steps"),
    ("an unknown optimizer", "--optimizer sgd", "sgd"),
    ("an unknown schedule", "--schedule linear", "linear"),
    ("an unknown number format", "--dtype int8", "int8"),
    ("an unknown packing", "--packing tight", "tight"),
    ("a device nobody makes", "--device tpu", "tpu"),
    ("a GPU that is not there", "--device cuda:77", "cuda:77"),
    ("a device that is no word", "--device ''", "device"),
    ("two places to begin", "laptop --config runs/done/config.json", "two places to start from"),
    ("a run and a config", "--resume runs/done --config runs/done/config.json", "two places to start from"),
    ("an empty --config", "--config=", "--config is empty"),
    ("an empty --resume", "--resume ''", "--resume is empty"),
]

CONFIGS = [  # what is wrong, what the file holds, word
    ("a config that is not JSON", "{", "is not JSON"),
    ("a config that is empty", "", "is not JSON"),
    ("a config that is a list", "[]", "a list where a dict"),
    ("a config that is a number", "3", "an int where a dict"),
    ("brackets without end", "[" * 100_000, "is not JSON"),
    ("an unknown group", '{"modle": {}}', "modle"),
    ("an unknown setting", '{"optim": {"lr": 1}}', "optim.lr"),
    ("a group that is a number", '{"optim": 3}', "optim"),
    ("a group that is a list", '{"model": []}', "model"),
    ("betas that are a number", '{"optim": {"betas": 0.9}}', "betas = 0.9 is not of the right type"),
    ("three betas", '{"optim": {"betas": [0.9, 0.9, 0.9]}}', "betas"),
    ("betas of words", '{"optim": {"betas": ["a", "b"]}}', "betas"),
    ("steps as text", '{"optim": {"max_steps": "10"}}', "max_steps = '10'"),
    ("steps as a list", '{"optim": {"max_steps": [10]}}', "max_steps"),
    ("steps as null", '{"optim": {"max_steps": null}}', "max_steps = None"),
    ("a rate as true", '{"optim": {"learning_rate": true}}', "learning_rate = True"),
    ("a rate without end", '{"optim": {"learning_rate": Infinity}}', "learning_rate"),
    ("layers as text", '{"model": {"n_layer": "2"}}', "n_layer = '2'"),
    ("layers as a half", '{"model": {"n_layer": 1.5}}', "n_layer = 1.5"),
    ("a name that is a number", '{"run": {"name": 7}}', "name = 7"),
    ("a name that is a path", '{"run": {"name": "../x"}}', "name = '../x'"),
    ("a source that is a list", '{"data": {"source": ["a"]}}', "source"),
    ("a loader nobody knows", '{"data": {"loader": "all"}}', "loader = 'all'"),
    ("no such config", None, "No such file"),
]

RUNS = [
    ("nothing to resume", "--resume runs/nothing", "runs/nothing"),
    ("a file to resume", "--resume text.txt", "text.txt"),
    ("a folder of something else", "--resume nothing", "nothing/config.json"),
    ("a run that saved nothing", "--resume runs/unsaved", "holds no checkpoint yet"),
    ("a run that saved nothing, to score", "--resume runs/unsaved --eval-only", "holds no checkpoint yet"),
    ("a run whose config is damaged", "--resume runs/damaged", "damaged/config.json is not JSON"),
    ("metrics of noise", "--resume runs/noise", "metrics.jsonl, line 1"),
    ("metrics without steps", "--resume runs/stepless", "metrics.jsonl, line 1"),
    ("metrics with a line of noise", "--resume runs/line", "metrics.jsonl, line 2"),
    ("metrics with a loss of words", "--resume runs/words", "metrics.jsonl, line 2"),
    ("metrics that are a folder", "--resume runs/folder", "metrics.jsonl"),
    ("another text", "--resume runs/done --data greek.txt", "the text of the data was"),
    ("another tokenizer", "--resume runs/done --tokenizer char", "the tokenizer of the data was"),
    ("another tokenizer, to score", "--resume runs/done --tokenizer char --eval-only", "the tokenizer"),
    ("another loader", "--resume runs/done --loader random --max-steps 9", "loader"),
    ("another model", "--resume runs/done --n-embd 32", "16 there, 32 here): a resumed run keeps its model"),
    ("another optimizer", "--resume runs/done --optimizer adamw --max-steps 9", "optimizer"),
    ("a run that is there", BYTES + " --name done", "--resume runs/done"),
    ("a run that saved nothing is there", BYTES + " --name unsaved", "start again with --overwrite"),
    ("a folder of something else is there", BYTES + " --name thesis", "exists: choose another --name"),
    ("a folder of something else, to be deleted", BYTES + " --name thesis --overwrite", "not deleted"),
    ("a run with a thesis in it, to be deleted", BYTES + " --name mixed --overwrite", "thesis.tex"),
    ("a file, to be deleted", BYTES + " --name file --overwrite", "is not a folder"),
    ("a link to a run, to be deleted", BYTES + " --name link --overwrite", "is a link"),
    ("a link to nothing", BYTES + " --name broken", "exists"),
    ("a link to nothing, to be deleted", BYTES + " --name broken --overwrite", "is a link"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache):
    "Good and bad texts, token files, and runs, made once: a refusal changes none of them."
    folder = tmp_path_factory.mktemp("bad")
    text = "".join(f"{i} days are {i * 24} hours. " for i in range(300))
    files = {"text.txt": text, "empty.txt": "", "short.txt": "too short", "thesis.tex": "years of work"}
    files |= {"greek.txt": "μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος\n" * 300}
    files |= {"documents.jsonl": '{"text": "a b c"}\n' * 9, "other.jsonl": '{"body": "a b c"}\n' * 9}
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "latin.txt").write_bytes("Äpfel".encode("latin-1"))
    (folder / "nothing").mkdir()
    write_token_data(folder / "cut", Corpus("t", ["abc" * 100], ["held out"], "a test"), ByteTokenizer())
    os.truncate(folder / "cut/train.bin", 21)
    CharTokenizer.train(text).save(folder / "char.json")
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(shlex.split(BYTES + " --name done")) == 0
    finally:
        os.chdir(before)
    damage(folder / "runs")
    return folder


def damage(runs: Path) -> None:
    "Copies of the run `done`, each with one thing wrong."
    done = runs / "done"
    metrics = (done / "metrics.jsonl").read_text().splitlines()
    lines = {"noise": "\0\x01", "stepless": '{"loss": 1}\n{"loss": 1}', "folder": None}
    lines |= {"line": "\n".join([metrics[0], "noise", *metrics[1:]])}
    lines |= {"words": "\n".join([metrics[0], '{"step": 1, "loss": "low"}', *metrics[1:]])}
    for name in ("unsaved", "damaged", "mixed", *lines):
        shutil.copytree(done, runs / name)
    for name, content in lines.items():
        path = runs / name / "metrics.jsonl"
        path.unlink()
        path.mkdir() if content is None else path.write_text(content)
    shutil.rmtree(runs / "unsaved/checkpoints")
    (runs / "damaged/config.json").write_text("{")
    (runs / "mixed/thesis.tex").write_text("years of work")
    (runs / "thesis").mkdir()
    (runs / "thesis/config.json").write_text(json.dumps({"font": "Times"}))
    (runs / "file").touch()
    (runs / "link").symlink_to(done)
    (runs / "broken").symlink_to(runs / "nowhere")


ARGUMENTS = [*NUMBERS, *NAMES, *TEXTS, *FLAGS, *RUNS]


@pytest.mark.parametrize("words, word", [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS])
def test_a_bad_command_is_refused_in_a_sentence(folder, words, word, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert_refused(main, shlex.split(words), word, folder, capsys)


@pytest.mark.parametrize("text, word", [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_a_bad_config_is_refused_in_a_sentence(folder, text, word, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    path = folder / "given.json"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    assert_refused(main, ["--config", "given.json"], word, folder, capsys)


def test_a_home_that_is_a_file_is_refused_in_a_sentence(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "text.txt"))
    assert_refused(main, shlex.split(BYTES + " --out '~/runs'"), "text.txt is not a folder", folder, capsys)


def test_a_cache_that_is_a_file_is_refused_in_a_sentence(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TINYGPT_CACHE", str(folder / "text.txt"))
    assert main(shlex.split(BYTES)) == 2
    assert "text.txt/tokens (Not a directory)" in capsys.readouterr().err
    assert not (folder / "runs/laptop").exists()


def test_the_table_is_long():
    assert len(ARGUMENTS) + len(CONFIGS) >= 110
