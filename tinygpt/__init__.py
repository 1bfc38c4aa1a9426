__version__ = "0.1.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import load_model as load_model
    from .checkpoint_open import open_model as open_model
    from .model import GPT as GPT
    from .model import GPTConfig as GPTConfig
    from .run.presets import preset as preset

# what `from tinygpt import` offers besides the modules: imported when it is asked for, because torch is slow
_MODULES = {
    "GPT": "model",
    "GPTConfig": "model",
    "load_model": "checkpoint",
    "open_model": "checkpoint_open",
    "preset": "run.presets",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
    return sorted({*globals(), *_MODULES})
