"""A reference page for each module, made from its source: nothing is imported, so torch is not needed.

What a page says stands in the source already: docstrings, signatures, and the comment behind each
parameter, which becomes a row of a table.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pages

PACKAGE = pages.ROOT / "tinygpt"


@dataclass
class Parameter:
    "A parameter of a function, or a field of a dataclass."

    name: str
    type: str  # as the source writes it; "" where it says nothing
    default: str  # likewise
    meaning: str  # the comment behind it, or the docstring under it


@dataclass
class Item:
    "What a module offers: a function, a class, a method or a constant."

    kind: str  # function, class, method, property, classmethod, staticmethod or data
    name: str  # of a method: Class.method
    signature: str  # with brackets and the arrow; of a constant its value, where that is short
    doc: str
    lines: tuple[int, int]  # first and last
    parameters: list[Parameter] = field(default_factory=list)
    members: list["Item"] = field(default_factory=list)


@dataclass
class Module:
    name: str  # with dots, without the package: data.windows
    path: Path
    doc: str
    items: list[Item]
    row: pages.Row | None = None  # of the index: the page that exports it


# ---- reading a source


@cache
def modules() -> dict[str, Module]:
    "All modules that pages export, in the order of the book."
    rows = {name: row for row in pages.contents() if (name := pages.module_of(row.path))}
    paths = {name: PACKAGE / f"{name.replace('.', '/')}.py" for name in rows}
    return {name: read_module(name, path, rows[name]) for name, path in paths.items()}


def read_module(name: str, path: Path, row: pages.Row | None = None) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    public = public_names(tree)
    notes = Notes(source)
    items = [item for node in tree.body for item in read_items(node, notes)]
    chosen = [item for item in items if item.name in public]
    return Module(name, path, ast.get_docstring(tree) or "", chosen, row)


def public_names(tree: ast.Module) -> list[str]:
    "What the module's `__all__` lists."
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


class Notes:
    "The comments of a source, by line: behind code, or alone on their lines."

    def __init__(self, source: str):
        self.lines = source.encode().splitlines()  # ast counts columns in bytes
        self.behind, self.alone = {}, {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                is_alone = token.line.strip().startswith("#")
                text = token.string.lstrip("#").strip()
                if not text.startswith("%%"):  # where a cell of the notebook begins
                    (self.alone if is_alone else self.behind)[token.start[0]] = text

    def text(self, node: ast.AST | None) -> str:
        "A node as the source writes it (1e-8, not 1e-08), on one line."
        if node is None:
            return ""
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b" ".join(lines).decode().split())

    def of(self, first: int, last: int) -> str:
        "The comment lines right above `first`, and what stands behind `last`."
        above = []
        while (first := first - 1) in self.alone:
            above.insert(0, self.alone[first])
        return " ".join([*above, self.behind.get(last, "")]).strip()


def read_items(node: ast.stmt, notes: Notes) -> list[Item]:
    "The function, the class or the constants that a statement defines."
    if is_function(node):
        return [read_function(node, notes, "")]
    if isinstance(node, ast.ClassDef):
        return [read_class(node, notes)]
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return []
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [part.id for part in targets if isinstance(part, ast.Name)]
    value = notes.text(node.value)
    shown = value if len(names) == 1 and len(value) <= 60 else ""
    lines = (node.lineno, node.end_lineno)
    return [Item("data", name, shown, notes.of(*lines), lines) for name in names]


def read_function(node: ast.FunctionDef, notes: Notes, owner: str) -> Item:
    kind = "method" if owner else "function"
    for decorator in node.decorator_list:
        last = ast.unparse(decorator).split(".")[-1]
        if last in ("property", "cached_property"):
            kind = "property"
        elif owner and last in ("classmethod", "staticmethod"):
            kind = last
    drop = 1 if owner and kind != "staticmethod" else 0  # self or cls
    name = f"{owner}.{node.name}" if owner else node.name
    result = f" -> {notes.text(node.returns)}" if node.returns else ""
    found = [] if kind == "property" else parameters_of(node.args, notes)[drop:]
    signature = result if kind == "property" else f"({arguments(found, node.args)}){result}"
    lines = (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno)
    return Item(kind, name, signature, ast.get_docstring(node) or "", lines, found)


def arguments(parameters: list[Parameter], args: ast.arguments) -> str:
    "What stands between the brackets of a signature, without the types, which the table has."
    shown = [f"{p.name}={p.default}" if p.default else p.name for p in parameters]
    if args.kwonlyargs and not args.vararg:
        shown.insert(len(shown) - len(args.kwonlyargs) - bool(args.kwarg), "*")
    return ", ".join(shown)


def parameters_of(args: ast.arguments, notes: Notes) -> list[Parameter]:
    positional = [*args.posonlyargs, *args.args]
    missing = [None] * (len(positional) - len(args.defaults))
    pairs = [*zip(positional, [*missing, *args.defaults])]
    pairs += [(args.vararg, None)] if args.vararg else []
    pairs += [*zip(args.kwonlyargs, args.kw_defaults)]
    pairs += [(args.kwarg, None)] if args.kwarg else []
    stars = {args.vararg: "*", args.kwarg: "**"}
    found = []
    for place, (arg, default) in enumerate(pairs):
        last = (default or arg).end_lineno
        # where several stand on one line, its comment is about the last of them
        shared = place + 1 < len(pairs) and pairs[place + 1][0].lineno == last
        text = "" if shared else notes.of(arg.lineno, last)
        name, type_ = stars.get(arg, "") + arg.arg, notes.text(arg.annotation)
        found.append(Parameter(name, type_, notes.text(default), text))
    return found


def read_class(node: ast.ClassDef, notes: Notes) -> Item:
    members = [read_function(child, notes, node.name) for child in node.body if is_function(child)]
    init = next((m for m in members if m.name.endswith(".__init__")), None)
    fields = fields_of(node, notes)
    if init:
        signature, parameters = init.signature.removesuffix(" -> None"), init.parameters
    else:
        is_dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        signature, parameters = ("(...)" if is_dataclass and fields else ""), fields
    public = [m for m in members if not m.name.split(".")[-1].startswith("_")]
    lines = (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno)
    doc = ast.get_docstring(node) or ""
    return Item("class", node.name, signature, doc, lines, parameters, public)


def is_function(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def fields_of(node: ast.ClassDef, notes: Notes) -> list[Parameter]:
    "The annotated names of a class body, with the docstring under each or the comment beside it."
    found = []
    for child, after in zip(node.body, [*node.body[1:], None]):
        if not isinstance(child, ast.AnnAssign) or child.target.id.startswith("_"):
            continue
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = " ".join(after.value.value.split()) if is_doc else notes.of(child.lineno, child.end_lineno)
        type_, value = notes.text(child.annotation), notes.text(child.value)
        found.append(Parameter(child.target.id, type_, value, text))
    return found


# ---- writing a page


def escaped(text: str) -> str:
    "Plain words for a Markdown page: what is between backticks stays, the rest means itself."
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]$~#`])", r"\\\1", part) for part in parts
    )


def in_code(text: str) -> str:
    return f"`{text}`" if text else ""


def table(parameters: list[Parameter], head: str) -> str:
    "One row a parameter: name, type and default, meaning."
    if not any(p.meaning or p.type for p in parameters):
        return ""
    rows = [f"| {head} | type | meaning |", "|---|---|---|"]
    for p in parameters:
        kind = f"{p.type} = {p.default}" if p.type and p.default else p.type or p.default and f"= {p.default}"
        cells = (in_code(p.name), in_code(kind), escaped(p.meaning))
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "{.parameters}\n" + "\n".join(rows) + "\n"


def entry(item: Item, module: str) -> str:
    "The Sphinx directive that describes an item, with its table."
    kind, options = item.kind, [f":module: tinygpt.{module}"]
    signature = item.signature
    if kind in ("classmethod", "staticmethod"):
        kind, options = "method", [*options, f":{kind}:"]
    if kind == "property":
        options += [f":type: {signature.removeprefix(' -> ')}"] if signature else []
        signature = ""
    if kind == "data":
        options += [f":value: {signature}"] if signature else []
        signature = ""
    head = "field" if item.signature == "(...)" or not item.signature else "parameter"
    body = [*options, "", escaped(item.doc), "", table(item.parameters, head)]
    text = "\n".join([f"````{{py:{kind}}} {item.name}{signature}", *body, "````\n"])
    return "\n".join([text, *(entry(member, module) for member in item.members)])


def module_page(module: Module, links: str) -> str:
    "The Markdown page of a module; `links` is the line under its title."
    head = [f"# tinygpt.{module.name}", "", f"````{{py:module}} tinygpt.{module.name}", "````", ""]
    head += ["{.lead}", f"> {escaped(module.doc)}", "", "{.page-links}", links, ""]
    return "\n".join([*head, *(entry(item, module.name) for item in module.items)])


def places() -> dict[tuple[str, str], str]:
    "(module, name) -> file and lines in the repository, for the links to the source."
    found = {}
    for module in modules().values():
        file = module.path.relative_to(pages.ROOT).as_posix()
        for item in module.items:
            for part in (item, *item.members):
                first, last = part.lines
                found[f"tinygpt.{module.name}", part.name] = f"{file}#L{first}-L{last}"
    return found
