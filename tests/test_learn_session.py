import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import textwrap
import types

import pytest
from other_solutions import SOLUTIONS

from tinygpt.learn import session
from tinygpt.learn.book import IDEAS, exercises_of, find_project, is_exported, make_hole, read_notebook
from tinygpt.learn.folder import Progress, start
from tinygpt.learn.judge import Verdict, copy_project
from tinygpt.learn.session import Result, check, check_here, collect, train
from tinygpt.support import UserError

ROOT = find_project()
HOLE = 'raise NotImplementedError("hole: Lane.wants")'
RIGHT = "return tuple(self.cursor[:2]) <= (chunk, document)"
WRONG = "return (chunk, document) > self.cursor[:2]"
SMALL = (
    "--tokenizer byte --loader stream --packing bos --max-steps 2 --warmup-steps 1 --batch-size 4 "
    "--block-size 32 --n-layer 1 --n-head 2 --n-embd 32 --eval-every 0 --sample-tokens 0 "
    "--compile off --threads 1 --no-compressors"
)


def put(path, body):
    "Write a body in place of the hole, as a learner does."
    nb = read_notebook(path)
    for cell in nb["cells"]:
        if "def wants" in cell["source"] and is_exported(cell):
            for old in (HOLE, RIGHT, WRONG):
                cell["source"] = cell["source"].replace(old, body)
    path.write_text(json.dumps(nb))


def package():
    "What the package is like: file -> hash."
    files = (ROOT / "tinygpt").rglob("*.py")
    return {p.relative_to(ROOT): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": f"Line {i} of a very small corpus."}) for i in range(400)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A folder with one notebook whose one hole was filled wrongly, checked, filled rightly and checked:
    folder, notebook, both results, and what the package was like before."""
    folder = tmp_path_factory.mktemp("learn")
    before = package()
    [path] = start("03_data_pack", ["Lane.wants"], folder)
    results = []
    for body, names in ((WRONG, ["Lane.wants"]), (RIGHT, None)):
        put(path, body)
        results.append(check("03_data_pack", names, folder=folder))
    return types.SimpleNamespace(folder=folder, path=path, wrong=results[0], right=results[1], before=before)


def test_a_wrong_solution_fails_a_right_one_passes_and_the_package_is_not_changed(learner):
    assert [v.state for v in learner.wrong.verdicts] == ["fails"]
    given = dict.fromkeys((d.name for d in exercises_of(ROOT, "03_data_pack")), "given")
    assert {v.name: v.state for v in learner.right.verdicts} == given | {"Lane.wants": "passes"}
    assert Progress(learner.folder).word("03_data_pack", "Lane.wants") == "solved"
    assert package() == learner.before


def test_a_result_reads_well_as_text_and_as_a_table(learner):
    text, table = str(learner.wrong), learner.wrong._repr_html_()
    assert text.startswith("Lane.wants                       FAILS\n    ")
    assert text.endswith("03_data_pack: 0 of 1 pass, 1 fail")
    assert table.count("<tr>") == 1 and "Lane.wants" in table and "<b>fails</b>" in table
    assert "<built" not in table


def test_holes_and_what_was_given_are_told_apart_in_a_result():
    states = {"a": "hole", "b": "given", "c": "not run", "d": "passes"}
    result = Result("10_adamw", [Verdict(name, state) for name, state in states.items()], notes=["A note."])
    assert str(result).splitlines() == [
        "A note.",
        f"{'a':32s} still a hole",
        f"{'b':32s} given",
        f"{'c':32s} not run",
        f"{'d':32s} passes",
        "10_adamw: 1 of 3 pass, 0 fail",
    ]
    assert "<b>still a hole</b>" in result._repr_html_() and "<p>A note.</p>" in result._repr_html_()


def test_only_what_passed_and_was_not_changed_since_is_put_to_work(learner, tmp_path):
    (tmp_path / "03_data_pack.ipynb").write_text(learner.path.read_text())
    (tmp_path / "progress.json").write_text((learner.folder / "progress.json").read_text())
    use, left_out = collect(ROOT, tmp_path)
    assert use["03_data_pack"][1] == ["Lane.wants"] and not left_out
    put(tmp_path / "03_data_pack.ipynb", WRONG)
    assert collect(ROOT, tmp_path) == ({}, ["data.pack.Lane.wants (not checked as it is now)"])
    with pytest.raises(UserError, match="no function of yours passes yet"):
        train([], folder=tmp_path)


@pytest.mark.slow
def test_train_trains_with_the_learners_functions_and_names_those_that_ran(learner, corpus, tmp_path, capsys):
    flags = f"--data {corpus} --out {tmp_path} {SMALL}"
    status, ran = train(flags.split(), folder=learner.folder, quiet=True)
    assert status == 0 and ran == ["data.pack:Lane.wants"]
    assert (tmp_path / "laptop/metrics.jsonl").exists()
    assert "yours that ran: data.pack.Lane.wants" in capsys.readouterr().out


def test_the_exit_status_is_the_trainers(learner, tmp_path, capsys):
    status, ran = train(["--no-such-flag", "--out", str(tmp_path)], folder=learner.folder, quiet=True)
    assert status == 2 and ran == []
    said = capsys.readouterr().out
    assert "yours that ran: none\nyours that this run did not need: data.pack.Lane.wants" in said


def test_in_a_notebook_what_the_kernel_ran_last_is_checked(learner, tmp_path, monkeypatch):
    (tmp_path / learner.path.name).write_text(learner.path.read_text())
    put(tmp_path / learner.path.name, WRONG)  # the file is older than what was run
    cell = next(c["source"] for c in read_notebook(learner.path)["cells"] if RIGHT in c["source"])
    monkeypatch.chdir(tmp_path)
    kernel = types.SimpleNamespace(user_ns={"In": ["1 + 1", cell]})
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    seen = {}

    def judge(root, work, names, seconds, tell):
        seen.update(work.written)
        return []

    monkeypatch.setattr("tinygpt.learn.session.judge", judge)
    result = check_here("03_data_pack")
    assert RIGHT in seen["Lane.wants"].text and "what this kernel ran last" in str(result)


def test_the_readme_tells_the_record_as_it_is():
    chapters = json.loads((ROOT / "benchmarks/results/teeth.json").read_text())["chapters"].values()
    red = [test for record in chapters for test in record.get("red", {}).values()]
    slips = [test for record in chapters for test in record.get("slips", {}).values()]
    holes_said = f"each of the {sum(map(bool, red))} holes turn a test red"
    slips_said = f"{sum(map(bool, slips))} of {len(slips)} wrong solutions caught"
    assert f"{holes_said}, and {slips_said}" in (ROOT / "README.md").read_text()
    assert all(red)


@pytest.fixture(scope="module")
def teeth():
    "benchmarks/teeth.py as a module."
    if sys.platform == "win32":
        pytest.skip("benchmarks/teeth.py forks")
    spec = importlib.util.spec_from_file_location("teeth", ROOT / "benchmarks/teeth.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_sample_of_the_tests_has_teeth(teeth, tmp_path):
    "A hole turns a test red, the solution turns it green; `make teeth` does it for every function."
    copy_project(ROOT, tmp_path)
    chapter = teeth.Chapter("03_data_pack", tmp_path)
    for name in ("Lane.take", "pack_best_fit"):
        test = chapter.red(name, make_hole(chapter.work.written[name]))
        assert test
        chapter.lay({name: chapter.work.written[name]})
        assert teeth.is_red(teeth.forked(tmp_path, [f"tests/{test}"])) is None


def test_a_slip_is_put_in_and_caught_and_one_that_is_not_there_is_told(teeth, tmp_path):
    copy_project(ROOT, tmp_path)
    chapter = teeth.Chapter("03_data_pack", tmp_path)
    definitions = teeth.all_definitions("03_data_pack")
    slip = next(s for s in teeth.slips_of("data.pack") if s.function == "pack_best_fit")
    test, said = teeth.examine_slip(chapter, slip, definitions)
    assert test.startswith("test_data_pack.py::") and said == f"caught by {test}"
    absent = dataclasses.replace(slip, old="no such text")
    test, said = teeth.examine_slip(chapter, absent, definitions)
    assert test is None and "'no such text' occurs 0 times" in said


def test_pages_are_chosen_by_number_name_and_module(teeth):
    pages = {"03_data": "data.windows", "03_data_stream": "data.stream", "10_adamw": "adamw"}
    assert teeth.choose(pages, []) == list(pages)
    assert teeth.choose(pages, ["3"]) == teeth.choose(pages, ["03"]) == ["03_data", "03_data_stream"]
    assert teeth.choose(pages, ["03_data", "adamw"]) == ["03_data", "10_adamw"]
    assert teeth.choose(pages, ["data.stream"]) == ["03_data_stream"]
    with pytest.raises(SystemExit, match="no page is called 04"):
        teeth.choose(pages, ["04"])


def test_two_processes_that_save_at_the_same_time_lose_nothing(teeth, tmp_path, monkeypatch):
    monkeypatch.setattr(teeth, "RESULTS", tmp_path / "teeth.json")
    teeth.save("gone", {"exercises": 1}, {"gone": "gone"})
    pages = {f"{i:02d}_page": f"m{i}" for i in range(40)}
    children = []
    for half in (0, 1):
        pid = os.fork()
        if pid == 0:
            for i in range(half, 40, 2):
                teeth.save(f"{i:02d}_page", {"exercises": i}, pages)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    saved = json.loads((tmp_path / "teeth.json").read_text())["chapters"]
    assert saved == {f"{i:02d}_page": {"exercises": i} for i in range(40)}  # and what is no page is left out
    assert [p.name for p in tmp_path.iterdir()] == ["teeth.json"]


def test_what_was_examined_is_examined_again_only_if_its_sources_or_its_slips_changed(
    teeth, tmp_path, monkeypatch
):
    copy_project(ROOT, tmp_path)
    asked = []
    monkeypatch.setattr(
        teeth.Chapter, "red", lambda self, name, text: asked.append(name) or "test_x.py::test"
    )
    monkeypatch.setattr(teeth.Chapter, "green", lambda self: asked.append("green") or {"failed": 0})

    def examine(before):
        asked.clear()
        return teeth.examine("03_data_pack", teeth.PARTS, tmp_path, before, lambda line: None)

    record = examine({})
    assert (
        "green" in asked and "Lane.take" in asked and len(record["slips"]) == len(teeth.slips_of("data.pack"))
    )
    assert examine(record) == record and asked == []
    assert examine(record | {"slip_sources": "others"}) == record and "green" not in asked and asked
    assert examine(record | {"sources": "others"}) == record and "green" in asked


def test_a_verdict_holds_for_the_helpers_too(tmp_path, monkeypatch):
    [path] = start("03_data_pack", ["Lane.wants"], tmp_path)
    nb = read_notebook(path)
    helper = dict(cell_type="code", id="mine", metadata={}, source="#| export\ndef mine(x):\n    return x")
    nb["cells"].insert(1, helper)
    path.write_text(json.dumps(nb))
    put(path, "return mine(RIGHT)")

    def judged(state):
        monkeypatch.setattr("tinygpt.learn.session.judge", lambda *_: [Verdict("Lane.wants", state)])
        check("03_data_pack", folder=tmp_path)
        return collect(ROOT, tmp_path)

    assert judged("not run")[1] == ["data.pack.Lane.wants (no test ran it)"]
    assert judged("passes")[0]["03_data_pack"][1] == ["Lane.wants"]
    path.write_text(path.read_text().replace("return x", "return 2 * x"))
    assert collect(ROOT, tmp_path) == ({}, ["data.pack.Lane.wants (not checked as it is now)"])


def test_a_function_that_did_not_run_is_named_with_the_flag_that_makes_it_run():
    assert session._unused("adamw:AdamW.step") == "adamw.AdamW.step (try --adamw own)"
    assert (
        session._unused("data.pack:Lane.wants") == "data.pack.Lane.wants (try --loader stream --packing bos)"
    )
    assert session._unused("adamw:check_adamw") == "adamw.check_adamw"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, which", [(page, i) for page in SOLUTIONS for i in range(len(SOLUTIONS[page]))]
)
def test_right_solutions_in_other_words_than_the_packages_pass(page, which, tmp_path):
    bodies = SOLUTIONS[page][which]
    [path] = start(page, list(bodies), tmp_path)
    nb = read_notebook(path)
    for name, body in bodies.items():
        hole = f'raise NotImplementedError("hole: {name}")'
        [cell] = [c for c in nb["cells"] if hole in c["source"]]
        line = next(line for line in cell["source"].splitlines() if hole in line)
        cell["source"] = cell["source"].replace(line, textwrap.indent(body.strip("\n"), line[: -len(hole)]))
    path.write_text(json.dumps(nb))
    verdicts = check(page, list(bodies), folder=tmp_path).verdicts
    assert {v.name: (v.state, v.why) for v in verdicts} == dict.fromkeys(bodies, ("passes", ""))


def test_each_function_of_the_first_hour_has_two_other_solutions():
    written = [name for sets in SOLUTIONS.values() for bodies in sets for name in bodies]
    assert sorted(written) == sorted(2 * list(IDEAS))
