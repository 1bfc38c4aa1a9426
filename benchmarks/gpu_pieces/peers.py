"""The models of nanoGPT and build-nanogpt, loaded from clones, each with the step of its script.

Nothing of theirs is kept here: `--nanogpt FOLDER` and `--build-nanogpt FOLDER` say where they lie.
"""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path

import torch
from torch import nn

from tinygpt.support import UserError


def load_classes(path: Path, **names) -> dict:
    "The classes of a script, with the imports above them, and without running the rest of it."
    if not path.is_file():
        raise UserError(f"{path} is not there: give the folder of a clone")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.names[0].name if isinstance(node, ast.Import) else node.module
            if importlib.util.find_spec(module.split(".")[0]) is None:
                continue  # its own helper, or a package that its classes do not need
        elif not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        body.append(node)
    module = type(sys)(path.stem)
    vars(module).update(names, __file__=str(path))
    sys.modules[module.__name__] = module  # dataclasses look for it
    try:
        exec(compile(ast.Module(body, []), str(path), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def make_model(setup, classes: dict, **settings):
    "(model, optimizer) of the size of GPT-2, by the peer's own classes."
    known = inspect.signature(classes["GPTConfig"]).parameters
    c = setup.pick(dict(vocab_size=50304, block_size=1024), dict(vocab_size=304, block_size=32))
    c |= setup.pick(dict(n_layer=12, n_head=12, n_embd=768), dict(n_layer=2, n_head=2, n_embd=32))
    c |= {name: value for name, value in settings.items() if name in known}
    torch.manual_seed(0)
    model = classes["GPT"](classes["GPTConfig"](**c)).to(setup.device)
    values = dict(weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95))
    values |= dict(device_type=setup.device, device=setup.device)
    wanted = inspect.signature(model.configure_optimizers).parameters
    return model, model.configure_optimizers(**{name: values[name] for name in wanted})


def batch(setup, rows: int) -> torch.Tensor:
    "Random tokens: (2, rows, T)."
    high, T = setup.pick((50257, 1024), (300, 32))
    return torch.randint(high, (2, rows, T), device=setup.device)


def autocast(setup):
    "What both scripts compute in on a GPU of today."
    return torch.autocast(setup.device, dtype=torch.bfloat16, enabled=setup.device == "cuda")


def nanogpt_step(setup, rows: int, compiled: bool):
    "The step of nanoGPT's bench.py: no clipping, and the loss is read in every step."
    model, optimizer = make_model(setup, load_classes(setup.nanogpt / "model.py"), dropout=0.0, bias=False)
    torch.set_float32_matmul_precision("high")
    run = torch.compile(model, backend=setup.backend) if compiled else model
    x, y = batch(setup, rows)

    def step():
        with autocast(setup):
            loss = run(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        return loss.detach()

    return step


def build_nanogpt_step(setup, rows: int, compiled: bool):
    "The step of build-nanogpt's train_gpt2.py with one micro-step: clipping, and a wait at the end."
    classes = load_classes(setup.build_nanogpt / "train_gpt2.py", master_process=False)
    model, optimizer = make_model(setup, classes)
    torch.set_float32_matmul_precision("high")
    run = torch.compile(model, backend=setup.backend) if compiled else model
    x, y = batch(setup, rows)

    def step():
        optimizer.zero_grad()
        with autocast(setup):
            loss = run(x, y)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if setup.device == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return step
