"""Bad input to learn, measure, ddp and the package as a library: one line a case.

What is wrong, the command, a word that the sentence has to hold. Status 2, and nothing is left behind.
"""

import math
import socket

import pytest
import torch
from bad_input import assert_refused

from tinygpt.attention import attention
from tinygpt.ddp.__main__ import main as ddp
from tinygpt.ddp.world import World, check_world, connect_store, init_world, run_processes
from tinygpt.learn.__main__ import main as learn
from tinygpt.learn.folder import Progress, hint, start
from tinygpt.learn.session import check
from tinygpt.measure.__main__ import main as measure
from tinygpt.measure.memory import largest_batch, memory_timeline, predict_memory
from tinygpt.measure.plan import plan
from tinygpt.model import GPT, Attention, Block, GPTConfig, KVCache, token_loss
from tinygpt.support import UserError, read_json

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*PLACE, "TORCHELASTIC_USE_AGENT_STORE", "TINYGPT_MEETING"):
        monkeypatch.delenv(name, raising=False)


# measure: machine and speed are given, so that nothing is measured ---------------------------------------

MEASURE = [
    ("tokens nan", "--tokens nan", "--tokens: 'nan' is not a whole number"),
    ("tokens below 0", "--tokens -1", "--tokens: '-1'"),
    ("tokens 0", "--tokens 0", "--tokens: '0'"),
    ("half a token", "--tokens 10.5", "--tokens: '10.5'"),
    ("a suffix alone", "--tokens M", "--tokens: 'M'"),
    ("tokens inf", "--tokens inf", "--tokens: 'inf'"),
    ("tokens a word", "--tokens many", "(10, 300M, 10B and 1e9 are)"),
    ("too many tokens", "--tokens 1e30", "more than any machine can do: choose at most 1e+17"),
    ("no rows", "--batch-size 0", "--batch-size: '0'"),
    ("rows a word", "--batch-size x", "--batch-size: 'x'"),
    ("a huge batch", "--batch-size 1e17", "--batch-size: 1e17 is more than any machine"),
    ("no context", "--block-size 0", "--block-size: '0'"),
    ("a huge context", "--block-size 1e12", "--block-size: 1e12 is more than any machine"),
    ("no vocabulary", "--vocab-size 0", "--vocab-size: '0'"),
    ("a huge vocabulary", "--vocab-size 1e12", "--vocab-size: 1e12 is more than any machine"),
    ("memory nan", "--memory nan", "--memory: 'nan' is not a number of GB"),
    ("memory 0", "--memory 0", "--memory: '0'"),
    ("memory below 0", "--memory -8", "--memory: '-8'"),
    ("memory inf", "--memory inf", "--memory: 'inf'"),
    ("memory with a unit", "--memory 8GB", "--memory: '8GB'"),
    ("memory of all worlds", "--memory 1e290", "from 1e-6 to 1e9"),
    ("speed nan", "--speed nan", "--speed: 'nan' is not a number of TFLOP/s"),
    ("speed 0", "--speed 0", "--speed: '0'"),
    ("speed inf", "--speed inf", "--speed: 'inf'"),
    ("speed next to none", "--speed 1e-300", "--speed: '1e-300'"),
    ("speed beyond light", "--speed 1e300", "--speed: '1e300'"),
    (
        "a variant nobody knows",
        "--variant gpt5",
        "--variant: 'gpt5' is not known: choose gpt2, llama, modern",
    ),
    ("an optimizer nobody knows", "--optimizer sgd", "choose adamw, muon"),
    ("a device nobody knows", "--device tpu", "choose auto, cpu, cuda, mps"),
    ("a format nobody knows", "--dtype int8", "choose auto, float32, bfloat16, float16"),
    ("a slip of the pen", "--tokns 3", "did you mean --tokens?"),
    ("a word too many", "extra", "extra is not a setting"),
    ("a flag without a value", "--tokens", "Missing value"),
]


@pytest.mark.parametrize("words, word", [case[1:] for case in MEASURE], ids=[case[0] for case in MEASURE])
def test_measure(words, word, tmp_path, capsys):
    assert_refused(measure, f"--memory 8 --speed 1 --device cpu {words}".split(), word, tmp_path, capsys)


# ddp: one process, and environments that cannot be -------------------------------------------------------

DDP = [
    ("a size below 0", "--mib -1", "mib = -1.0 is not the size"),
    ("a size of 0", "--mib 0", "mib = 0.0 is not the size"),
    ("a size nan", "--mib nan", "mib = nan is not the size"),
    ("a size inf", "--mib inf", "mib = inf is not the size"),
    ("less than a number", "--mib 1e-9", "mib = 1e-09 is not the size"),
    ("more than the memory", "--mib 1e12", "are free: choose at most"),
    ("a size that is a word", "--mib x", "could not convert"),
    ("a timeout below 0", "--timeout -1", "timeout = '-1.0' is not a number of seconds"),
    ("a timeout of 0", "--timeout 0", "timeout = '0.0' is not a number of seconds"),
    ("a timeout nan", "--timeout nan", "timeout = 'nan'"),
    ("a timeout inf", "--timeout inf", "timeout = 'inf'"),
    ("a timeout of an age", "--timeout 1e300", "from 1 to 1000000"),
    ("a device nobody knows", "--device gpu", "device = gpu is not known"),
    ("a device without numbers", "--device meta", "device = meta is not known"),
    ("a slip of the pen", "--devic cpu", "did you mean --device?"),
    ("a word too many", "extra", "extra is not a setting"),
    ("a flag without a value", "--mib", "Missing value"),
]
TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "FREE"}
PLACES = [
    ("a rank alone", {"RANK": "0"}, "RANK = 0 in the environment, but LOCAL_RANK, WORLD_SIZE"),
    ("a rank that is no number, alone", {"RANK": "x"}, "RANK = x in the environment, but"),
    ("a size alone", {"WORLD_SIZE": "2"}, "but RANK, LOCAL_RANK, MASTER_PORT, MASTER_ADDR not"),
    ("no address", TWO | {"MASTER_ADDR": ""}, "but MASTER_ADDR not"),
    ("a rank that is a word", TWO | {"RANK": "x"}, "RANK = 'x' in the environment is not a number"),
    ("a rank below 0", TWO | {"RANK": "-1"}, "RANK = -1 in the environment is below 0"),
    ("a rank too high", TWO | {"RANK": "2"}, "RANK = 2 is not below WORLD_SIZE = 2"),
    ("no processes", TWO | {"WORLD_SIZE": "0"}, "WORLD_SIZE = 0 in the environment is below 1"),
    ("half a process", TWO | {"WORLD_SIZE": "1.5"}, "WORLD_SIZE = '1.5' in the environment is not a number"),
    ("a port that is a word", TWO | {"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
    ("port 0", TWO | {"MASTER_PORT": "0"}, "MASTER_PORT = 0 in the environment is below 1"),
    ("a port too high", TWO | {"MASTER_PORT": "99999"}, "MASTER_PORT = 99999 is above 65535"),
    ("a local rank below 0", TWO | {"LOCAL_RANK": "-3"}, "LOCAL_RANK = -3"),
    ("a local size that is a word", TWO | {"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE = 'all'"),
    ("nobody comes", TWO, "waiting for 1 of 2 processes at 127.0.0.1:FREE: rank 1, and 1 s are over"),
    ("nobody is at the address", TWO | {"RANK": "1"}, "no answer from 127.0.0.1:FREE"),
    ("a host that is none", TWO | {"MASTER_ADDR": "no.invalid"}, "no answer from no.invalid:FREE"),
]


@pytest.mark.parametrize("words, word", [case[1:] for case in DDP], ids=[case[0] for case in DDP])
def test_ddp(words, word, tmp_path, capsys):
    assert_refused(ddp, f"--device cpu {words}".split(), word, tmp_path, capsys)


@pytest.mark.parametrize("env, word", [case[1:] for case in PLACES], ids=[case[0] for case in PLACES])
def test_ddp_in_an_environment_that_cannot_be(env, word, tmp_path, capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in env.items():
        monkeypatch.setenv(name, value.replace("FREE", port))
    words = ["--device", "cpu", "--mib", "1", "--timeout", "1"]
    assert_refused(ddp, words, word.replace("FREE", port), tmp_path, capsys)


# learn: words, and files of the learner's that are damaged -----------------------------------------------

LEARN = [
    ("a chapter nobody knows", "start 99", "chapter = 99 is not one of those with exercises"),
    ("a path for a chapter", "start ../10_adamw", "chapter = ../10_adamw is not"),
    ("a number without end", f"start {'9' * 5000}", "is not one of those with exercises"),
    ("a hole nobody knows", "start 10 --only adam", "adam is not an exercise of 10_adamw"),
    ("no name behind --only", "start 10 --only", "--only: name at least one function"),
    ("no chapter", "start", "CHAPTER"),
    ("no notebook", "check 10", "is not there: begin with python -m tinygpt.learn start 10_adamw"),
    ("a function nobody knows", "check 10 adam", "adam is not an exercise of 10_adamw"),
    ("seconds below 0", "check 10 --seconds -1", "seconds = -1.0 is not a time"),
    ("seconds of 0", "check 10 --seconds 0", "seconds = 0.0 is not a time"),
    ("seconds nan", "check 10 --seconds nan", "seconds = nan is not a time"),
    ("seconds inf", "check 10 --seconds inf", "seconds = inf is not a time"),
    ("seconds that are a word", "check 10 --seconds x", "could not convert"),
    ("a hint for nobody", "hint 10 adam", "adam is not an exercise of chapter 10"),
    ("a hint without a name", "hint 10", "NAME"),
    ("a solution for nobody", "show 10 adam", "adam is not an exercise of chapter 10"),
    ("a reset of nothing", "reset", "reset: name one chapter, or say --all"),
    ("a reset of one and all", "reset 10 --all", "reset: name one chapter, or say --all"),
    ("a reset of nobody", "reset 99", "chapter = 99 is not"),
    ("nothing to train with", "train laptop", "no function of yours passes yet"),
    ("a command nobody knows", "strat 10", "Expected one of {list, start, check"),
    ("a slip of the pen", "check 10 --second 3", "did you mean --seconds?"),
    ("a word too many", "list 10 11", "11 is not a setting"),
]
PROGRESS = [
    ("a list", "list", "[]", "holds a list where a dict should be"),
    ("a number", "hint 10 adamw_update", "5", "holds an int where a dict should be"),
    ("cut off", "show 10 adamw_update", '{"10_adamw": {', "is not JSON"),
    ("not UTF-8", "list 10", b"\xff\xfe", "is not JSON"),
    ("brackets without end", "list 10", "[" * 100_000, "is not JSON"),
    ("a chapter that is a list", "list 10", '{"10_adamw": []}', "not a table of chapters"),
    ("a function that is a number", "list 10", '{"10_adamw": {"AdamW": 1}}', "not a table"),
    ("hints that are a word", "list 10", '{"10_adamw": {"AdamW": {"hints": "two"}}}', "not a table"),
    ("hints below 0", "hint 10 adamw_update", '{"10_adamw": {"AdamW": {"hints": -5}}}', "not a table"),
    ("a state that is a list", "train laptop", '{"10_adamw": {"AdamW": {"state": []}}}', "not a table"),
    ("a damaged one at a reset", "reset 10", "[]", "python -m tinygpt.learn reset --all"),
    ("a folder", "list 10", None, "cannot be read (Is a directory)"),
]
NOTEBOOKS = [
    ("empty", "check 10", "", "is not JSON"),
    ("a list", "check 10", "[]", "holds a list where a dict should be"),
    ("cut off", "train laptop", '{"cells": [', "is not JSON"),
    ("not UTF-8", "check 10", b"\xff\xfe\x00", "is not JSON"),
    ("without cells", "check 10", "{}", "is not a notebook any more"),
    ("cells that are a number", "train laptop", '{"cells": 5}', "is not a notebook any more"),
    ("a cell that is a number", "check 10", '{"cells": [5]}', "is not a notebook any more"),
    ("no source", "check 10", '{"cells": [{"cell_type": "code"}]}', "is not a notebook any more"),
    ("no kind", "check 10", '{"cells": [{"source": ""}]}', "is not a notebook any more"),
    ("source of numbers", "check 10", '{"cells": [{"cell_type": "code", "source": [1]}]}', "any more"),
    ("metadata that are a number", "check 10", '{"cells": [], "metadata": 5}', "any more"),
    ("metadata with a list", "train laptop", '{"cells": [], "metadata": {"tinygpt": []}}', "any more"),
    ("holes that are a number", "check 10", '{"cells": [], "metadata": {"tinygpt": {"holes": 1}}}', "more"),
    ("a folder", "check 10", None, "cannot be read (Is a directory)"),
    ("a folder, at a start", "start 10", None, "reset 10_adamw moves it aside"),
]


def learn_in(folder, words):
    return ["--folder", str(folder), *words.split()]


@pytest.mark.parametrize("words, word", [case[1:] for case in LEARN], ids=[case[0] for case in LEARN])
def test_learn(words, word, tmp_path, capsys):
    assert_refused(learn, learn_in(tmp_path / "learn", words), word, tmp_path, capsys)


@pytest.mark.parametrize(
    "words", ["list", "start 10", "check 10", "hint 10 adamw_update", "reset 10", "train"]
)
def test_learn_where_a_file_is_in_the_way(words, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/below"):
        assert_refused(learn, learn_in(tmp_path / folder, words), "is not a folder: choose", tmp_path, capsys)
    assert_refused(learn, ["--folder", "", *words.split()], "an empty word", tmp_path, capsys)


def put(path, content):
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("words, content, word", [c[1:] for c in PROGRESS], ids=[c[0] for c in PROGRESS])
def test_learn_with_a_progress_file_that_is(words, content, word, tmp_path, capsys):
    put(tmp_path / "progress.json", content)
    (tmp_path / "10_adamw.ipynb").write_text('{"cells": [], "metadata": {}}')  # stays where it is
    assert_refused(learn, learn_in(tmp_path, words), word, tmp_path, capsys)
    assert learn(learn_in(tmp_path, "reset --all")) == 0  # as it says
    assert Progress(tmp_path).data == {}


@pytest.mark.parametrize("words, content, word", [c[1:] for c in NOTEBOOKS], ids=[c[0] for c in NOTEBOOKS])
def test_learn_with_a_notebook_that_is(words, content, word, tmp_path, capsys):
    put(tmp_path / "10_adamw.ipynb", content)
    assert_refused(learn, learn_in(tmp_path, words), word, tmp_path, capsys)


def test_what_is_advised_for_a_damaged_notebook_keeps_it_and_gives_a_clean_one(tmp_path, capsys):
    for content in ("[]", None):
        (tmp_path / "10_adamw.ipynb").unlink(missing_ok=True)
        put(tmp_path / "10_adamw.ipynb", content)
        assert learn(learn_in(tmp_path, "reset 10_adamw")) == 0
        assert "there was nothing to move" not in capsys.readouterr().out
        assert read_json(tmp_path / "10_adamw.ipynb")["cells"]
    assert len(list((tmp_path / "old").glob("*/10_adamw.ipynb"))) == 2


# the package as a library --------------------------------------------------------------------------------

SMALL = GPTConfig(vocab_size=100, block_size=8, n_layer=1, n_head=2, n_embd=16)
Q, K, V = torch.randn(3, 1, 2, 5, 8)
X = torch.randn(1, 5, 16)
IDS = torch.zeros(1, 5, dtype=torch.int64)


def in_a_test(world):
    pass


LIBRARY = [
    ("heads that do not divide", lambda: Attention(GPTConfig(n_embd=10, n_head=3), 0), "n_head = 3"),
    ("key heads that do not divide", lambda: Block(GPTConfig(n_kv_head=5), 0), "n_kv_head = 5"),
    (
        "a rope that is missing",
        lambda: Block(GPTConfig.llama(n_embd=16, n_head=2), 0)(X),
        "no rope was given",
    ),
    ("no layers", lambda: GPT(GPTConfig(n_layer=0)), "n_layer = 0 does not work"),
    ("a negative width", lambda: GPT(GPTConfig(n_embd=-16)), "n_embd = -16"),
    ("an MLP nobody knows", lambda: GPT(GPTConfig(mlp="relu")), "gelu, gelu_exact, swiglu, relu2"),
    ("a dropout nan", lambda: GPT(GPTConfig(dropout=math.nan)), "dropout = nan"),
    ("too many tokens", lambda: GPT(SMALL)(torch.zeros(1, 9).long()), "block_size = 8"),
    ("a full cache", lambda: GPT(SMALL)(IDS, cache=full_cache()), "give at most 0 more"),
    ("an implementation nobody knows", lambda: GPT(SMALL, "flash"), "attn_impl = 'flash'"),
    ("a field nobody knows", lambda: GPTConfig.from_dict({"depth": 3}), "depth"),
    ("logits of two dimensions", lambda: token_loss(torch.randn(5, 9), IDS[0]), r"\(B, T, V\)"),
    ("targets of another length", lambda: token_loss(torch.randn(1, 4, 9), IDS), "one target for each"),
    ("queries of three dimensions", lambda: attention(Q[0], K, V), "four dimensions"),
    ("values of another length", lambda: attention(Q, K, V[:, :, :3]), "must share"),
    ("a window of 0", lambda: attention(Q, K, V, window=0), "window = 0"),
    ("a dropout of 1", lambda: attention(Q, K, V, dropout=1.0), "dropout = 1.0"),
    ("a mask for tiles", lambda: attention(Q, K, V, impl="tiled", mask=Q[0, 0] > 0), "takes no mask"),
    ("a mask of whole numbers", lambda: attention(Q, K, V, mask=IDS), "mask is of torch.int64"),
    ("a mask of another size", lambda: attention(Q, K, V, mask=torch.zeros(4, 5)), "does not spread"),
    ("a batch of 0", lambda: predict_memory(SMALL, 0), "batch_size = 0"),
    ("a batch nan", lambda: memory_timeline(SMALL, math.nan), "batch_size = nan"),
    ("memory inf", lambda: largest_batch(SMALL, math.inf), "memory = inf"),
    ("memory of a plan nan", lambda: plan(math.nan, 1e12), "memory = nan"),
    ("speed of a plan 0", lambda: plan(1e9, 0), "speed = 0"),
    ("a plan for nobody", lambda: plan(1e9, 1e12, variant="gpt5"), "variant = 'gpt5'"),
    ("tokens of a plan below 0", lambda: plan(1e9, 1e12, tokens=-1), "tokens = -1"),
    ("no processes", lambda: run_processes(in_a_test, 0), "world_size = 0"),
    ("half a process", lambda: run_processes(in_a_test, 1.5), "world_size = 1.5"),
    ("no time", lambda: run_processes(in_a_test, 1, timeout=math.nan), "timeout = 'nan'"),
    ("a function without a name", lambda: run_processes(lambda world: 0, 1), "put it in a module"),
    ("a world on no device", lambda: init_world("gpu"), "device = gpu is not known"),
    ("a world without time", lambda: init_world("cpu", 0), "timeout = '0'"),
    ("a store for nobody", lambda: connect_store("test", 10), "no RANK and no WORLD_SIZE"),
    ("a sum of nothing", lambda: check_world(World(), 0), "mib = 0 is not the size"),
    ("learn: a chapter nobody knows", lambda: start("99"), "chapter = 99"),
    ("learn: a hint for nobody", lambda: hint("10", "adam"), "adam is not an exercise"),
    ("learn: no time", lambda: check("10_adamw", seconds=math.nan), "seconds = nan"),
]


def full_cache():
    cache = KVCache(SMALL, 1)
    cache.length = SMALL.block_size
    return cache


@pytest.mark.parametrize("call, word", [case[1:] for case in LIBRARY], ids=[case[0] for case in LIBRARY])
def test_library(call, word):
    with pytest.raises(UserError, match=word):
        call()


# what is asked for in order ------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [measure, ddp, learn], ids=["measure", "ddp", "learn"])
@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_is_no_mistake(main, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and "--help" in out and not err


@pytest.mark.parametrize("command", ["list", "start", "check", "hint", "show", "reset"])
def test_help_of_each_command_of_learn(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        learn(learn_in(tmp_path, f"{command} --help"))
    assert ended.value.code == 0 and command in capsys.readouterr().out
