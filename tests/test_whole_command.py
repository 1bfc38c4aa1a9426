"""The whole process: four commands in a row that may be interrupted anywhere, one exam, one table."""

import importlib
import json
import math
import os
import random
import re
import signal
import statistics
import sys
from itertools import combinations
from pathlib import Path

import pytest

import tinygpt.whole.__main__ as whole
from tinygpt.finetune.tasks import TASKS, make_examples
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.model import GPT, GPTConfig
from tinygpt.reinforce.policy import Answer
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer


def test_each_run_begins_with_the_one_before_and_takes_its_own_flags(tmp_path):
    options = whole.Options(out=str(tmp_path), preset="gpt2", rewards="--max-steps 5 --tasks 'add' sort")
    stages = whole.stages_of(options)
    assert [stage.start for stage in stages] == ["gpt2"] + [str(s.folder) for s in stages[:-1]]
    assert [stage.module.split(".")[1] for stage in stages] == ["train", "finetune", "prefer", "reinforce"]
    assert stages[-1].words("new")[-5:] == ["--max-steps", "5", "--tasks", "add", "sort"]
    with pytest.raises(UserError, match='base = "it\'s" is not a list of flags'):
        whole.stages_of(whole.Options(base="it's"))
    placed = ("base", "--name other", "--name"), ("answers", "--out=x", "--out"), ("rewards", "-h", "-h")
    for name, flags, flag in placed:
        with pytest.raises(UserError, match=f"{name}: {flag} is not for one of the four runs"):
            whole.stages_of(whole.Options(**{name: flags}))


@pytest.fixture
def ran(monkeypatch):
    "The commands that were run; none of them does anything, and all succeed."
    commands = []
    monkeypatch.setattr(whole, "run_command", lambda words: commands.append(words[1:]) or 0)
    return commands


def test_a_run_that_is_done_stays_and_one_that_was_interrupted_goes_on(tmp_path, ran):
    [base, *_] = whole.stages_of(whole.Options(out=str(tmp_path)))
    assert not whole.run_stage(base)  # nothing was made
    assert ran.pop() == ["-m", *base.words("new")] and "--overwrite" not in base.words("new")

    base.folder.mkdir()  # it was begun, and never saved
    assert not whole.run_stage(base) and ran.pop()[-1] == "--overwrite"

    (base.folder / "checkpoints/step_000005").mkdir(parents=True)
    assert not whole.run_stage(base) and ran.pop() == ["-m", "tinygpt.train", "--resume", str(base.folder)]

    (base.folder / "report.md").touch()
    assert whole.run_stage(base) and not ran


def test_several_processes_go_through_torchrun(tmp_path, ran):
    whole.run_stage(whole.stages_of(whole.Options(out=str(tmp_path)))[0], processes=3)
    begin = "-m torch.distributed.run --standalone --nproc-per-node 3 -m tinygpt.train laptop"
    assert " ".join(ran[0]).startswith(begin)


def test_a_command_that_fails_ends_the_process_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "run_command", lambda words: 2)
    with pytest.raises(UserError, match="base ended with status 2: .* the same command again"):
        whole.run_stage(whole.stages_of(whole.Options(out=str(tmp_path)))[0])


def test_solved_questions_are_of_the_task_fit_the_room_and_hold_nothing_of_the_test():
    tokenizer = ByteTokenizer()
    for example in make_examples(16, 3, "test"):
        ids = whole.few_shot_ids(tokenizer, example, 300, random.Random(0))
        text = tokenizer.decode(ids)
        assert len(ids) <= 300 and ids[0] == tokenizer.eot
        *solved, last = text.split("Question: ")[1:]
        assert last == f"{example.messages[-1]['content']}\nAnswer:" and solved
        wordings = [w.split("{")[0].strip() for w in TASKS[example.task].train]
        for line in solved:
            assert any(w in line for w in wordings) and "Answer: " in line
    longest = whole.few_shot_ids(tokenizer, example, 10, random.Random(0))  # the question alone
    assert tokenizer.decode(longest).count("Question:") == 1


def test_a_base_answers_with_its_first_line_and_a_chat_with_its_turn():
    base = ByteTokenizer()
    model = GPT(GPTConfig.llama(vocab_size=257, block_size=256, n_layer=1, n_head=1, n_embd=8))
    examples = make_examples(3, 0, "test")
    exam = whole.exam_for(model, base, examples)
    assert max(map(len, exam.prompts)) <= 256 - exam.room

    def answer(exam, tokenizer, said, finish="length"):
        return exam.answer(tokenizer, Answer([0], new=tokenizer.encode(said), finish=finish))

    assert answer(exam, base, "\n\n 12 \nQuestion") == "12 " and answer(exam, base, "12") is None
    assert answer(exam, base, "12", "end") == "12" and answer(exam, base, "\n") is None
    chat = chat_tokenizer(base)
    exam = whole.exam_for(model, chat, examples)
    ended = Answer([0], new=[*chat.encode("1\n2"), chat.special["<|end|>"]], finish="end")
    assert exam.answer(chat, ended) == "1\n2" and answer(exam, chat, "1\n2") is None
    assert exam.prompts[0] == render(chat, examples[0].messages, add_generation_prompt=True)[0]


def test_the_exam_counts_what_is_right_and_ended(monkeypatch):
    chat = chat_tokenizer(ByteTokenizer())
    model = GPT(GPTConfig.llama(vocab_size=257, block_size=256, n_layer=1, n_head=1, n_embd=8))
    examples = make_examples(5, 0, "test", ["add"])
    end = chat.special["<|end|>"]
    by_prompt = {tuple(p): e for p, e in zip(whole.exam_for(model, chat, examples).prompts, examples)}

    def written(row, said, finish="end"):
        row.new, row.finish = [*chat.encode(said), end], finish
        return row

    def greedy(model, rows, *_, **__):  # right, right and not ended, wrong, right, wrong
        for row in rows:
            i = examples.index(by_prompt[tuple(row.prompt)])
            answer = examples[i].answer
            said = [(answer, "end"), (answer, "length"), ("no", "end"), (answer, "end"), ("", "end")][i]
            written(row, *said)

    def drawn(model, prompts, group, room, ends, seeds):  # of question i the first i are right
        answers = []
        for prompt in prompts:
            i = examples.index(by_prompt[tuple(prompt)])
            answers += [written(Answer(prompt), examples[i].answer if j < i else "no") for j in range(group)]
        assert len(set(seeds)) == len(seeds) == group * len(prompts)
        return answers

    monkeypatch.setattr(whole, "write_rows", greedy)
    monkeypatch.setattr(whole, "draw_answers", drawn)
    found = whole.sit_exam(model, chat, examples, draws=4, rows=2)
    assert found["right"] == {"add": [2, 5]} and found["outcomes"] == [1, 0, 0, 1, 0]
    for k in (1, 4):  # all ways to choose k of the four answers, counted
        ways = [[any(j < i for j in chosen) for chosen in combinations(range(4), k)] for i in range(5)]
        assert found[f"pass@{k}"] == pytest.approx(statistics.mean(statistics.mean(w) for w in ways))


def test_the_difference_is_that_of_a_paired_sample():
    before, after = [0, 1, 0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 1, 1, 1]
    mean, half = whole.difference(before, after)
    gains = [b - a for a, b in zip(before, after)]
    assert mean == statistics.mean(gains)
    assert half == pytest.approx(2.3646 * statistics.stdev(gains) / math.sqrt(8), rel=1e-4)  # Student's, 7


TINY = "--compile off --eval-every 0 --final-eval-tokens 300"
PAIRS = [dict(prompt=f"Say {i}", chosen=f"{i}", rejected="no") for i in range(8)]


@pytest.mark.slow
def test_the_whole_process_in_small_stops_goes_on_and_ends_with_a_page(tmp_path, words, monkeypatch, capsys):
    modules = []

    def in_this_process(command):
        _, _, module, *argv = command
        modules.append(module)
        place = module if module == "tinygpt.train" else f"{module}.__main__"
        return importlib.import_module(place).main(argv) or 0

    monkeypatch.setattr(whole, "run_command", in_this_process)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    tiny = "--n-layer 1 --n-head 1 --n-embd 8 --block-size 512 --batch-size 2 --no-compressors"
    flags = [
        f"--base={TINY} {tiny} --source {words} --tokenizer byte --max-steps 2 --sample-tokens 0",
        f"--answers={TINY} --max-steps 2 --conversations 8 --batch-size 2 --questions 0",
        f"--preferences={TINY} --max-steps 2 --data {tmp_path}/pairs.jsonl --batch-size 4",
        f"--rewards={TINY} --max-steps 1 --batch-size 8 --group 4 --tasks add --questions 2",
    ]
    argv = ["--out", str(tmp_path / "out"), "--questions", "8", "--device", "cpu", *flags]

    monkeypatch.setattr(whole, "state_of", lambda folder: "new")  # as if each were stopped at once
    assert whole.main(argv) == 0 and "stopped in base; continue with: python -m tinygpt.whole" in (
        capsys.readouterr().out
    )
    monkeypatch.undo()
    monkeypatch.setattr(whole, "run_command", in_this_process)
    results = tmp_path / "out/results.json"
    spent = json.loads(results.read_text())["base"]["seconds"]
    assert spent > 0  # also of a run that was stopped
    modules.clear()
    assert whole.main(argv) == 0, capsys.readouterr().err
    assert modules == ["tinygpt.finetune", "tinygpt.prefer", "tinygpt.reinforce"]  # base was done
    page = (tmp_path / "out/report.md").read_text()
    for name in ("base", "answers", "preferences", "rewards"):
        assert f"\n| {name} | " in page
    assert all(prompt in page for prompt in whole.PROMPTS)
    assert (tmp_path / "out/stages.png").exists() and "rewards against base" in page

    modules.clear()
    monkeypatch.setattr(whole, "sit_exam", None)  # nothing is measured again
    assert whole.main(argv) == 0 and not modules
    assert Path(tmp_path / "out/report.md").read_text() == page
    assert json.loads(results.read_text())["base"]["seconds"] < spent + 1  # nor is anything made again

    capsys.readouterr()
    for flags, told in (
        (["--seed", "2"], "base: .*base was made with '--seed 1337 .* and '--seed 2 .*remove this run"),
        (["--preset", "gpt2"], "base: .*base was made with 'laptop', and 'gpt2' is asked for"),
        (["--rewards=--max-steps 9"], "rewards: .*rewards was made with .* another --out"),
    ):
        assert whole.main([*argv, *flags]) == 2 and not modules
        assert re.search(told, capsys.readouterr().err)
    assert Path(tmp_path / "out/report.md").read_text() == page

    results.unlink()  # a run that was made by hand, perhaps otherwise
    assert whole.main(argv) == 2 and not modules
    assert re.search("base: results.json does not say how .*base was made", capsys.readouterr().err)


STOPS = "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(1); sys.exit({})"
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")


@pytest.fixture
def interruptible():
    "Ctrl-C reaches this process, also where the tests run in the background of a shell, which ignores it."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@posix
def test_ctrl_c_waits_until_the_command_has_saved(interruptible):
    assert whole.run_command([sys.executable, "-c", STOPS.format(7)]) == 7


@posix
@pytest.mark.parametrize("status, further", [(130, []), (1, ["-m", "torch.distributed.run"])])
def test_a_command_that_ctrl_c_stopped_has_not_failed(interruptible, capsys, status, further):
    assert whole.run_command([sys.executable, "-c", STOPS.format(status), *further]) == 0
    told = "torchrun ended with status 1, as after any Ctrl-C"  # which may hide a full disk
    assert (told in capsys.readouterr().out) == bool(further)
    ends = f"import sys; sys.exit({status})"  # the same status without Ctrl-C
    assert whole.run_command([sys.executable, "-c", ends, *further]) == status


HANDLES = "import os, signal, time; signal.signal(signal.SIGINT, {}); signal.signal(signal.SIGTERM, {});"
HANDLES += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"


@posix
@pytest.mark.parametrize("ignored", [False, True])  # as in the background of a shell
def test_sigterm_reaches_the_command_and_ends_both(ignored):
    def undone(*_):
        raise AssertionError("SIGTERM would have ended this process, and the command would go on alone")

    before = signal.signal(signal.SIGTERM, undone)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        saves = "lambda *_: os._exit(130)"
        wrong = "lambda *_: os._exit(9)"  # after a SIGTERM of its own, a second one would end a run unsaved
        handlers = (wrong, saves) if ignored else (saves, wrong)
        assert whole.run_command([sys.executable, "-c", HANDLES.format(*handlers)]) == 0
        assert signal.getsignal(signal.SIGTERM) is undone
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


def test_torchrun_gives_its_processes_more_than_half_a_minute_to_save(monkeypatch):
    asks = "import os, sys; sys.exit(int(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']) % 256)"
    assert whole.run_command([sys.executable, "-c", asks]) == 600 % 256
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "77")  # who asked for less gets it
    assert whole.run_command([sys.executable, "-c", asks]) == 77


def test_whoever_removes_the_base_is_told_of_the_start_that_was_made_of_it(tmp_path):
    base, answers, *_ = whole.stages_of(whole.Options(out=str(tmp_path)))
    with pytest.raises(UserError, match="remove this run, those after it and answers-start$"):
        whole.check_made(base, ["laptop"], ["gpt2"])
    with pytest.raises(UserError, match="remove this run and those after it$"):
        whole.check_made(answers, ["--seed 1"], ["--seed 2"])
