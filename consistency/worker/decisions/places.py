"""Which module of a model is running, so that a decision can be named by its place."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from consistency.capture.names import WHOLE_MODEL

_OF_PEFT = "base_model.model."


class Places(AbstractContextManager["Places"]):
    """Follow the modules of a model while it runs.

    Attributes
    ----------
    now : str
        The innermost module that is running, by its name in the base; the whole model in a backward pass.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name.removeprefix(_OF_PEFT) for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._hooks = ExitStack()

    @property
    def now(self) -> str:
        return next((name for name in reversed(self._stack) if name), WHOLE_MODEL)

    def __enter__(self) -> Places:
        self._stack.clear()
        begins = register_module_forward_pre_hook(self._begin)
        self._hooks.callback(begins.remove)
        self._hooks.callback(register_module_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def _end(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
