import json

import pytest

from tinygpt.learn.book import exercises_of, find_project, read_notebook
from tinygpt.learn.folder import Progress, hint, overview, reset, show, start
from tinygpt.support import UserError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "learn"


def work_on(path):
    "Change the notebook as a learner would; returns its text."
    nb = read_notebook(path)
    nb["cells"][4]["source"] += "\n# mine"
    path.write_text(json.dumps(nb))
    return path.read_text()


def test_start_writes_all_notebooks_of_a_number_and_one_by_its_name(folder):
    assert {p.name for p in start("11", folder=folder)} >= {"11_schedule.ipynb", "11_schedule_finder.ipynb"}
    assert [p.name for p in start("10_adamw", folder=folder)] == ["10_adamw.ipynb"]
    assert [p.name for p in start("adamw", ["adamw_update"], folder)] == ["10_adamw.ipynb"]


def test_the_notebooks_of_chapters_and_side_pages_lie_in_one_folder(folder):
    assert start("03_data", folder=folder) == [folder / "03_data.ipynb"]
    assert start("data.stream", folder=folder) == [folder / "03_data_stream.ipynb"]


def test_only_finds_the_notebook_of_a_number_that_has_the_function(folder):
    assert [p.name for p in start("11", ["find_lr"], folder)] == ["11_schedule_finder.ipynb"]
    with pytest.raises(UserError, match="only = nothing is not an exercise of"):
        start("11", ["nothing"], folder)


def test_a_notebook_that_was_worked_on_is_not_overwritten_and_then_none_is(folder):
    start("11", folder=folder)
    (folder / "11_schedule.ipynb").unlink()
    text = work_on(folder / "11_schedule_finder.ipynb")
    said = "11_schedule_finder.ipynb was worked on and stays as it is: reset 11_schedule_finder"
    with pytest.raises(UserError, match=said):
        start("11", folder=folder)
    assert (folder / "11_schedule_finder.ipynb").read_text() == text
    assert not (folder / "11_schedule.ipynb").exists()


def test_an_untouched_notebook_may_be_written_again_and_outputs_do_not_count(folder):
    [path] = start("10", folder=folder)
    nb = read_notebook(path)
    for cell in nb["cells"]:
        cell.pop("outputs", None)
    path.write_text(json.dumps(nb))
    assert start("10", folder=folder) == [path] and "outputs" in path.read_text()


def test_a_file_that_is_no_notebook_any_more_is_kept_too(folder):
    [path] = start("10", folder=folder)
    path.write_text("{ half")
    with pytest.raises(UserError, match="worked on"):
        start("10", folder=folder)
    assert path.read_text() == "{ half"


def test_reset_keeps_every_version_and_gives_a_clean_one(folder):
    [path] = start("10", folder=folder)
    clean, kept = path.read_text(), []
    for _ in range(3):
        text = work_on(path)
        kept.append((reset("10", folder)[0], text))
        assert path.read_text() == clean
    path.write_text("broken")
    reset("10", folder)
    assert len({old for old, _ in kept}) == 3
    assert all(old.read_text() == text for old, text in kept)
    assert path.read_text() == clean


def test_reset_all_leaves_a_clean_state_whatever_was_broken(folder):
    [path] = start("10", folder=folder)
    path.write_text("broken")
    (folder / "progress.json").write_text("broken too")
    with pytest.raises(UserError, match="progress.json is not JSON.*reset --all"):
        Progress(folder)
    moved = reset(None, folder)
    assert {p.read_text() for p in moved} == {"broken", "broken too"}
    assert [p.name for p in folder.iterdir()] == ["old"]
    assert "solved, " not in overview("10", folder) and reset(None, folder) == []


def test_hints_come_one_by_one_are_counted_and_show_is_remembered(folder):
    said = [hint("10", "adamw_update", folder) for _ in range(4)]
    assert len(set(said)) == 3 and said[2] == said[3]
    assert "hint 1 of 3" in said[0] and "show 10_adamw adamw_update" in said[2]
    assert Progress(folder).word("10_adamw", "adamw_update") == "open, 3 hints"
    assert "p.addcdiv_(exp_avg, denom, value=-step_size)" in show("10", "adamw_update", folder)
    assert Progress(folder).word("10_adamw", "adamw_update") == "open, 3 hints, shown"


def test_what_is_asked_about_must_exist(folder):
    with pytest.raises(UserError, match="adam is not an exercise of chapter 10: choose among adamw_update"):
        hint("10", "adam", folder)
    with pytest.raises(UserError, match="chapter = 77"):
        show("77", "adam", folder)


def test_progress_survives_and_is_listed(folder):
    progress = Progress(folder)
    progress.of("10_adamw", "adamw_update").update(state="passes", hints=1)
    progress.save()
    assert json.loads((folder / "progress.json").read_text()) == {
        "10_adamw": {"adamw_update": {"state": "passes", "hints": 1}}
    }
    n = len(exercises_of(find_project(), "10_adamw"))
    text = overview("10", folder)
    assert f"1 of {n:2d} solved" in text and f"1 of {n} functions solved" in text
    assert "adamw_update                       solved, 1 hint" in text


def test_a_reset_function_is_open_again_and_its_hints_are_remembered(folder):
    progress = Progress(folder)
    progress.of("10_adamw", "adamw_update").update(state="passes", hints=2, shown=True)
    progress.save()
    reset("10", folder)
    assert Progress(folder).word("10_adamw", "adamw_update") == "open, 2 hints, shown"


@pytest.mark.parametrize("text", ["[]", "3", '{"10_adamw": []}', '{"10_adamw": {"adamw_update": 1}}', "{"])
def test_a_progress_file_that_is_no_table_is_told_and_left(folder, text):
    folder.mkdir()
    (folder / "progress.json").write_text(text)
    with pytest.raises(UserError, match="progress.json (is|holds).*delete it, check makes it again"):
        Progress(folder)
    assert (folder / "progress.json").read_text() == text


def test_reset_gives_clean_ones_of_the_notebooks_that_were_started_with_their_holes(folder):
    [path] = start("11", ["make_schedule"], folder)
    clean = path.read_text()
    work_on(path)
    assert [p.name for p in reset("11", folder)] == ["11_schedule.ipynb"]
    assert path.read_text() == clean
    assert [p.name for p in folder.glob("*.ipynb")] == ["11_schedule.ipynb"]
