import hashlib
import importlib.util
import json
import subprocess
import sys
import types

import pytest

from tinygpt.learn.__main__ import main
from tinygpt.learn.book import find_project, is_exported, read_notebook
from tinygpt.learn.folder import Progress, start
from tinygpt.learn.session import check, check_here, collect, train
from tinygpt.support import UserError

ROOT = find_project()
HOLE = 'raise NotImplementedError("hole: Lane.wants")'
RIGHT, WRONG = (
    "return tuple(self.cursor[:2]) <= (chunk, document)",
    "return (chunk, document) > self.cursor[:2]",
)


def put(path, body):
    "Write a body in place of the hole, as a learner does."
    nb = read_notebook(path)
    for cell in nb["cells"]:
        if "def wants" in cell["source"] and is_exported(cell):
            for old in (HOLE, RIGHT, WRONG):
                cell["source"] = cell["source"].replace(old, body)
    path.write_text(json.dumps(nb))


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    "A folder with one notebook whose one hole was filled wrongly, checked, filled rightly and checked: (folder, notebook, both results, what the package was like)."
    folder = tmp_path_factory.mktemp("learn")
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (ROOT / "tinygpt").glob("*.py")}
    [path] = start("03_data_pack", ["Lane.wants"], folder)
    results = []
    for body in (WRONG, RIGHT):
        put(path, body)
        results.append(check("03_data_pack", ["Lane.wants"], folder=folder))
    return types.SimpleNamespace(folder=folder, path=path, wrong=results[0], right=results[1], before=before)


def test_a_wrong_solution_fails_a_right_one_passes_and_the_package_is_not_changed(learner):
    assert [v.state for v in learner.wrong.verdicts] == ["fails"] and [
        v.state for v in learner.right.verdicts
    ] == ["passes"]
    assert Progress(learner.folder).word("03_data_pack", "Lane.wants") == "solved"
    assert {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (ROOT / "tinygpt").glob("*.py")
    } == learner.before


def test_a_result_reads_well_as_text_and_as_a_table(learner):
    text, table = str(learner.wrong), learner.wrong._repr_html_()
    assert text.startswith("Lane.wants                       FAILS\n    ") and text.endswith(
        "03_data_pack: 0 of 1 pass, 1 fail"
    )
    assert (
        table.count("<tr>") == 1
        and "Lane.wants" in table
        and "<b>fails</b>" in table
        and "<built" not in table
    )


def test_only_what_passed_and_was_not_changed_since_is_put_to_work(learner, tmp_path):
    (tmp_path / "03_data_pack.ipynb").write_text(learner.path.read_text())
    (tmp_path / "progress.json").write_text((learner.folder / "progress.json").read_text())
    use, left_out = collect(ROOT, tmp_path)
    assert use["03_data_pack"][1] == ["Lane.wants"] and not left_out
    put(tmp_path / "03_data_pack.ipynb", WRONG)
    assert collect(ROOT, tmp_path) == ({}, ["data_pack.Lane.wants (not checked as it is now)"])
    with pytest.raises(UserError, match="no function of yours passes yet"):
        train([], folder=tmp_path)


def test_train_trains_with_the_learners_functions_and_names_those_that_ran(learner, tmp_path, capsys):
    corpus = tmp_path / "lines.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"Line {i} of a very small corpus."}) + "\n" for i in range(400))
    )
    flags = f"--data {corpus} --tokenizer byte --loader stream --packing bos --out {tmp_path} --max-steps 2 --warmup-steps 1 --batch-size 4 --block-size 32 --n-layer 1 --n-head 2"
    flags += " --n-embd 32 --eval-every 0 --sample-tokens 0 --compile off --threads 1"
    status, ran = train(flags.split(), folder=learner.folder, quiet=True)
    assert status == 0 and ran == ["data_pack:Lane.wants"] and (tmp_path / "laptop/metrics.jsonl").exists()
    assert "yours that ran: data_pack.Lane.wants" in capsys.readouterr().out


def test_in_a_notebook_what_the_kernel_ran_last_is_checked(learner, tmp_path, monkeypatch):
    (tmp_path / learner.path.name).write_text(learner.path.read_text())
    put(tmp_path / learner.path.name, WRONG)  # the file is older than what was run
    cell = next(c["source"] for c in read_notebook(learner.path)["cells"] if RIGHT in c["source"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(user_ns={"In": ["1 + 1", cell]}))
    seen = {}
    monkeypatch.setattr(
        "tinygpt.learn.judge", lambda root, work, names, seconds, tell: seen.update(work.written) or []
    )
    result = check_here("03_data_pack")
    assert RIGHT in seen["Lane.wants"].text and "what this kernel ran last" in str(result)


def test_mistakes_on_the_command_line_are_told_in_a_sentence(tmp_path, capsys):
    for argv, said in (
        (["check", "10"], "10_adamw.ipynb is not there: begin with python -m tinygpt.learn start 10_adamw"),
        (["start", "99"], "chapter = 99 is not one of those with exercises"),
        (["start", "10", "--only", "adam"], "only = adam is no exercise of 10_adamw"),
        (["hint", "10", "adam"], "adam is no exercise of chapter 10"),
        (["reset"], "reset: name one chapter, or say --all"),
        (["train", "laptop", "--max-steps", "1"], "no function of yours passes yet"),
        (["list", "--all"], "list does not know --all"),
        (["learn"], "invalid choice: 'learn'"),
    ):
        assert main(["--folder", str(tmp_path), *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.ipynb"))


def test_the_commands_tell_what_they_did(tmp_path, capsys):
    run = lambda *argv: (main(["--folder", str(tmp_path), *argv]), capsys.readouterr().out)
    assert run("start", "10") == (
        0,
        f"{tmp_path / '10_adamw.ipynb'}: open it in JupyterLab, fill the holes, run its last cell\n",
    )
    assert (
        "hint 1 of 3" in run("hint", "10", "adamw_update")[1]
        and "addcdiv_" in run("show", "10", "adamw_update")[1]
    )
    assert "adamw_update                       open, 1 hint, shown" in run("list")[1]
    status, text = run("check", "10")  # nothing but holes: no test is run
    assert status == 0 and text.count("still a hole") > 5
    assert run("reset", "--all")[0] == 0 and not list(tmp_path.glob("*.ipynb"))


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "tinygpt.learn.session", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "your solution trains the GPT" in done.stdout


def test_the_readme_tells_the_record_as_it_is():
    chapters = json.loads((ROOT / "benchmarks/results/teeth.json").read_text())["chapters"].values()
    red, slips = ([test for r in chapters for test in r.get(part, {}).values()] for part in ("red", "slips"))
    assert (
        f"each of the {sum(map(bool, red))} holes turn a test red, and {sum(map(bool, slips))} of {len(slips)} wrong solutions caught"
        in (ROOT / "README.md").read_text()
    )
    assert all(red)


@pytest.mark.skipif(sys.platform == "win32", reason="benchmarks/teeth.py forks")
def test_a_sample_of_the_tests_has_teeth(tmp_path):
    "Holes turn a chapter's tests red, the solution of the same notebook turns them green; `make teeth` does it for every function."
    from tinygpt.learn.book import make_hole
    from tinygpt.learn.judge import copy_project

    spec = importlib.util.spec_from_file_location("teeth", ROOT / "benchmarks/teeth.py")
    teeth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(teeth)
    copy_project(ROOT, tmp_path)
    chapter = teeth.Chapter("03_data_pack", tmp_path)
    for name in ("Lane.take", "pack_best_fit"):
        test = chapter.red(name, make_hole(chapter.work.written[name]))
        assert test
        chapter.lay({name: chapter.work.written[name]})
        assert teeth.is_red(teeth.forked(tmp_path, [f"tests/{test}"])) is None


def test_under_torchrun_every_process_trains_with_the_learners_functions_and_the_first_one_speaks(
    learner, tmp_path
):
    corpus = tmp_path / "lines.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"Line {i} of a very small corpus."}) + "\n" for i in range(400))
    )
    flags = f"--data {corpus} --tokenizer byte --loader stream --packing bos --out {tmp_path} --max-steps 2 --warmup-steps 1 --batch-size 4 --block-size 32 --n-layer 1 --n-head 2"
    flags += " --n-embd 32 --eval-every 0 --sample-tokens 0 --compile off --threads 1 --device cpu --no-compressors"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tinygpt.learn.session",
        "--folder",
        str(learner.folder),
        "train",
    ]
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "on 2 processes" in done.stdout
    assert (
        done.stdout.count("yours: data_pack.Lane.wants")
        == done.stdout.count("yours that ran: data_pack.Lane.wants")
        == 1
    )


def test_under_torchrun_a_mistake_is_told_once(tmp_path, capsys, monkeypatch):
    for rank, told in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert (
            main(["--folder", str(tmp_path), "train"]) == 2
            and capsys.readouterr().err.count("no function of yours passes yet") == told
        )
