"""Every wrong solution of slips.py can be put into the function that it names, and is Python."""

import ast
import builtins
import dis
import importlib
import textwrap
from types import CodeType

import pytest
from slips import SLIPS, Slip, places

from tinygpt.learn.book import all_pages, exports_in, find_project, module_in, page_path, read_notebook

ROOT = find_project()


def slip(old, new=""):
    return Slip("toy", "f", old, new, "a reason")


def test_layout_comments_quotes_and_a_last_comma_do_not_count():
    text = "f(\n    'a',  # first\n    b=2,\n)\nx = [1,\n     2]"
    assert [text[a:b] for a, b in places(text, 'f("a", b=2)')] == ["f(\n    'a',  # first\n    b=2,\n)"]
    assert [text[a:b] for a, b in places(text, "[1, 2,]")] == ["[1,\n     2]"]
    assert [text[a:b] for a, b in places(text, "    x=[  # why\n")] == ["x = ["]


def test_a_part_of_a_token_is_no_match():
    assert not places("value_of(x)", "value") and not places("a ** b", "*") and not places("a << b", "< b")
    assert not places("'one two'", "one") and not places("x = 10", "x = 1") and not places("a <= b", "<")


def test_a_text_that_is_a_piece_of_a_statement_is_found():
    assert len(places("y = x[0][-1] if a else b", "[-1] if a")) == 1
    assert len(places("def f(x):\n    if x:\n        g(x\n          )\n    h()", "g(x)\n    h(")) == 1


def test_a_string_with_quotes_brackets_or_a_hash_in_it_is_one_token():
    text = r"""f("it's a (# no comment", '''one "two"''', r"\\", '\'', b'x')  # comment ' here"""
    for part in (r'b"x")', r'r"\\", ', r"""'''one "two"'''""", '"it\'s a (# no comment"'):
        assert len(places(text, part)) == 1, part
    assert not places(text, "no comment") and not places(text, "here")


def test_only_the_place_is_replaced():
    text = "def f(x):\n    y = g(x,\n          1)  # why\n    return y"
    assert slip("g(x, 1)", "x").put_into(text) == "def f(x):\n    y = x  # why\n    return y"
    assert slip("    return y", "    return x").put_into(text).endswith("\n    return x")
    assert slip(", 1").put_into(text) == "def f(x):\n    y = g(x)  # why\n    return y"


@pytest.mark.parametrize(("old", "times"), [("z", 0), ("x", 2)])
def test_a_text_that_is_not_there_exactly_once_is_an_error(old, times):
    with pytest.raises(ValueError, match=f"toy.f: '{old}' occurs {times} times"):
        slip(old, "y").put_into("def f(x):\n    return x")


def names_from_outside(code: CodeType) -> set[str]:
    "What a function and those in it look up in their module."
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return found.union(
        *(names_from_outside(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    )


def unknown_names(text: str, module: str) -> set[str]:
    "The names in a function's text that nothing has: a test would turn red for them, and not for the slip."
    names = names_from_outside(compile(textwrap.dedent(text), module, "exec"))
    there = importlib.import_module(f"tinygpt.{module}")
    return {name for name in names if not hasattr(there, name) and not hasattr(builtins, name)}


def test_a_name_that_nothing_has_is_found():
    text = "def f(x):\n    def g():\n        return probs + x + len(x) + Slip\n    return g"
    assert unknown_names(text, "support") == {"probs", "Slip"}


def test_every_slip_is_in_its_function_exactly_once_and_makes_other_python():
    definitions = {}
    for page in all_pages(ROOT):
        nb = read_notebook(page_path(ROOT, page))
        definitions |= {(module_in(nb), d.name): d for d in exports_in(nb)}
    problems = []
    for s in SLIPS:
        definition = definitions.get((s.module, s.function))
        if definition is None:
            problems.append(f"{s.module} has no {s.function}")
            continue
        try:
            text = s.put_into(definition.text)
            if ast.dump(ast.parse(text)) == ast.dump(ast.parse(definition.text)):
                problems.append(f"{s.module}.{s.function}: {s.why} changes nothing")
            if names := unknown_names(text, s.module):
                problems.append(f"{s.module}.{s.function}: {s.why}: nothing is called {names}")
        except ValueError as error:
            problems.append(str(error))
        except SyntaxError as error:
            problems.append(f"{s.module}.{s.function}: {s.why}: {error}")
    assert not problems, "\n".join(problems)


def test_no_slip_is_told_twice():
    labels = [(s.module, s.function, s.why) for s in SLIPS]
    assert len(labels) == len(set(labels))
