import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from tinygpt.data.__main__ import main
from tinygpt.data.documents import HUB
from tinygpt.data.prepare import prepare_shards
from tinygpt.data.tokens import CORPORA, open_token_data
from tinygpt.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
    "A folder of jsonl files with documents of different length."
    rng = np.random.default_rng(0)
    texts = [f"document {i} " + "words " * int(rng.integers(0, 30)) for i in range(120)]
    (tmp_path / "in").mkdir()
    for k in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[40 * k : 40 * k + 40]]
        (tmp_path / f"in/{k}.jsonl").write_text("".join(lines))
    return tmp_path / "in"


def test_the_command_prepares_verifies_and_explains(folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    flags = "--tokenizer byte --workers 0 --val-fraction 0.1".split()
    assert main(["prepare", str(folder), out, *flags]) == 0
    assert main(["verify", out]) == 0 and "as meta.json says" in capsys.readouterr().out
    assert main(["prepare", str(folder), out]) == 2 and "exists" in capsys.readouterr().err
    assert main(["prepare", str(tmp_path / "nowhere"), out + "2"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["prepare", "sotu", str(tmp_path / "sotu"), "--tokenizer", "byte"]) == 0
    assert open_token_data(tmp_path / "sotu").meta["splits"]["train"]["documents"] == 237
    assert isinstance(open_token_data(out).tokenizer, ByteTokenizer)


def test_a_command_or_a_flag_that_does_not_exist_ends_in_one_sentence(folder, tmp_path, capsys):
    for argv in ([], ["check", str(folder)]):
        assert main(argv) == 2
        assert "choose prepare or verify" in capsys.readouterr().err
    assert main(["prepare", str(folder), str(tmp_path / "out"), "--vocab-siz", "300"]) == 2
    assert "did you mean --vocab-size?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_names_the_commands_and_every_data_set_that_has_a_name(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "prepare" in shown and "verify" in shown
    with pytest.raises(SystemExit) as ending:
        main(["prepare", "--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*CORPORA, *HUB])


def test_ctrl_c_says_that_the_same_command_goes_on(folder, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        if begun:
            (tmp_path / "out.partial").mkdir()
        raise KeyboardInterrupt

    begun = False
    monkeypatch.setattr("tinygpt.data.__main__.prepare_shards", interrupted)
    assert main(["prepare", str(folder), str(tmp_path / "out")]) == 2
    assert "nothing was written" in capsys.readouterr().err
    begun = True
    assert main(["prepare", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the same command continues where it stopped" in said and "out.partial" in said


def many_documents(folder):
    "Enough text that tokenizing it takes a while."
    folder.mkdir()
    words = np.random.default_rng(0).integers(97, 123, size=4000).astype(np.uint8).tobytes().decode()
    with open(folder / "d.jsonl", "w") as f:
        for i in range(8000):
            f.write(json.dumps({"text": f"{i} {words[i % 1000 :][: 1000 + i % 3000]}"}) + "\n")


def wait_for(path, process):
    "Until there is such a file, or the process that should make it has ended."
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)
    assert path.exists(), process.communicate()


def prepare_argv(folder, out, *flags):
    argv = [sys.executable, "-m", "tinygpt.data", "prepare", str(folder), str(out)]
    return [*argv, "--tokenizer", "byte", "--shard-tokens", "1000000", *flags]


def test_killed_for_real_while_workers_are_busy_it_goes_on_to_the_same_bytes(tmp_path):
    folder = tmp_path / "in"
    many_documents(folder)
    argv = prepare_argv(folder, tmp_path / "out", "--workers", "1")
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(tmp_path / "out.partial/train_000003.bin", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial/progress.json").exists()
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens of" in done.stdout and "tinygpt.train --source" in done.stdout
    prepare_shards(str(folder), tmp_path / "whole", "byte", shard_tokens=1_000_000, workers=0)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert len(list((tmp_path / "out").iterdir())) == len(list((tmp_path / "whole").iterdir()))
    assert not (tmp_path / "out.partial.lock").exists()  # what the kill had left is cleared away


def test_workers_end_when_the_process_that_began_them_is_killed(tmp_path):
    many_documents(tmp_path / "in")
    argv = prepare_argv(tmp_path / "in", tmp_path / "out", "--workers", "2")
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(tmp_path / "out.partial/train_000001.bin", process)
    process.kill()  # it alone
    try:
        process.communicate(timeout=120)  # the pipe has no end as long as a worker holds it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_command_that_is_printed_can_be_pasted(tmp_path, monkeypatch, capsys):
    (tmp_path / "one.txt").write_text("A sentence of some length. " * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "one.txt", "my tokens; $(touch x)", "--tokenizer", "byte"]) == 0
    printed = capsys.readouterr().out.split("train on it with: ")[1].strip()
    assert shlex.split(printed)[1:] == ["-m", "tinygpt.train", "--source", "my tokens; $(touch x)"]


def test_a_text_that_names_the_special_token_is_reported_and_the_remedy_works(tmp_path, monkeypatch, capsys):
    stories = "\n<|endoftext|>\n".join(f"Story {i} of many, and its end." for i in range(100))
    (tmp_path / "s.txt").write_text(stories)
    monkeypatch.chdir(tmp_path)
    flags = ["--tokenizer", "byte", "--workers", "0", "--val-fraction", "0.1"]
    assert main(["prepare", "s.txt", "a", *flags]) == 0
    said = capsys.readouterr().out
    assert "99 times" in said
    advice = said.split("give ")[1].split("\n")[0]
    assert main(["prepare", "s.txt", "b", *flags, *shlex.split(advice)]) == 0
    assert "<|endoftext|>" not in capsys.readouterr().out
    splits = open_token_data(tmp_path / "b").meta["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 100


def test_nanogpts_folder_is_verified_to_its_last_id(tmp_path, capsys):
    for name in ("train", "val"):
        np.arange(2_000_000, dtype=np.uint16).astype(np.uint16).clip(0, 256).tofile(tmp_path / f"{name}.bin")
    assert main(["verify", str(tmp_path), "--tokenizer", "byte"]) == 0
    assert "4,000,000 tokens, all in the vocabulary of 257" in capsys.readouterr().out
    tokens = np.fromfile(tmp_path / "val.bin", dtype=np.uint16)
    tokens[1_000_000] = 300  # opening looks at both ends only
    tokens.tofile(tmp_path / "val.bin")
    assert main(["verify", str(tmp_path), "--tokenizer", "byte"]) == 2
    assert "holds id 300" in capsys.readouterr().err


def test_settings_that_a_single_text_has_no_use_for_are_named(folder, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("A sentence of some length. " * 40)
    flags = "--tokenizer byte --workers 0 --shard-tokens 500".split()
    assert main(["prepare", str(tmp_path / "one.txt"), str(tmp_path / "a"), *flags]) == 0
    assert "one shard: --shard-tokens, --workers had no part in it" in capsys.readouterr().out
    assert main(["prepare", str(tmp_path / "one.txt"), str(tmp_path / "b"), *flags[:2]]) == 0
    assert main(["prepare", str(folder), str(tmp_path / "c"), *flags, "--val-fraction", "0.1"]) == 0
    assert "no part in it" not in capsys.readouterr().out


def test_a_separator_is_advised_for_txt_only_whatever_the_path(tmp_path, capsys):
    (tmp_path / "a x b").mkdir()
    rows = [{"text": f"Story {i} of many.<|endoftext|>"} for i in range(100)]
    (tmp_path / "a x b/s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--tokenizer", "byte", "--workers", "0", "--val-fraction", "0.1"]
    assert main(["prepare", str(tmp_path / "a x b/s.jsonl"), str(tmp_path / "one"), *flags]) == 0
    said = capsys.readouterr().out
    assert "100 x <|endoftext|> in it" in said and "--separator" not in said
    (tmp_path / "a x b/s.txt").write_text("".join(row["text"] for row in rows))
    assert main(["prepare", str(tmp_path / "a x b/s.txt"), str(tmp_path / "two"), *flags]) == 0
    assert "--separator" in capsys.readouterr().out
