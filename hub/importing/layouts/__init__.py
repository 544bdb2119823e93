"""Supported layouts: each module defines one or several."""

from importlib import import_module
from pkgutil import iter_modules

from ..layout import Layout
from ..toolkits import fairseq, opennmt

MODULES = [*(import_module(f".{each.name}", __name__) for each in iter_modules(__path__)), fairseq, opennmt]
LAYOUTS: dict[str, Layout] = {
    each.name: each for module in MODULES for each in vars(module).values() if isinstance(each, Layout)
}
