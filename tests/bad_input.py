"""What every refusal has in common: status 2, one sentence that holds a word, and nothing left behind.

The tables are in tests/test_bad_input_*.py, one line a case: what is wrong, the command, the word.
"""

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    "Every file, folder and link below `folder`, with the hash of what is in it."
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found


def assert_refused(
    main,  # of a command
    argv: list[str],
    word: str,  # that the sentence has to hold
    folder: Path,  # where nothing may change
    capsys,
) -> str:
    "Run the command in this process; returns what it said."
    before = tree(folder)
    capsys.readouterr()
    try:
        status = main(argv)
    except SystemExit as stopped:  # a value of the wrong type: tyro prints a box
        status = stopped.code
        sentences = 1
    else:
        sentences = None
    said = capsys.readouterr().err
    if sentences is None:
        sentences = sum(line.startswith("error: ") for line in said.splitlines())
    assert status == 2, f"ended with {status} and said: {said}"
    assert sentences == 1, said
    assert "Traceback" not in said
    assert word in " ".join(said.split()), said
    assert len(said) < 1500, f"{len(said)} characters are no sentence: {said[:300]}"
    assert tree(folder) == before, "something was left behind, changed or deleted"
    return said
