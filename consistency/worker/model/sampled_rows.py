"""Compute some rows of a long text, in blocks that stand for all.

Kernels are chosen by shape, so a text as long as people use is computed beside the short ones. Two things keep that
cheap:

* **Few blocks.** Blocks of one kind run the same kernels on the same shapes. The first, the middle and the last one of
  each kind are computed; every other block hands on what it gets.
* **Few rows.** What a block makes of a token depends on other tokens by their keys and values alone. So the code of a
  block is called twice: with all tokens until its attention hands keys and values to the cache, and then with the
  sampled tokens, whose cache returns the keys and values of all. The model's own code runs in both; that it computes a
  row by itself is checked in float64 on the first tokens, and a block that does not is computed for all tokens.

A device computes its blocks on all tokens, and the sampled rows of its results are compared.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree

from consistency.numerics.exact import Float64Mode
from consistency.worker.model.block_pass import BlockBegan, BlockPass, Given, ResultPlace, Take, no_listener
from consistency.worker.model.id_checks import text_config
from consistency.worker.model.running import Activations, outputs, without_gradients
from consistency.worker.model.structure import blocks_of
from consistency.worker.recorder import Skip

SEED = 2522
"""Seed of the rows that are drawn at random."""

_AT_RANDOM = 12
"""Rows that are drawn at random: with the others there are enough for the limits of one pass."""

_MOST_TOKENS_IN_FULL = 1024
"""Tokens up to which a block is computed for all of them where it cannot be for some: attention by its formula keeps
the scores of all pairs, in float64 2 GiB for 32 heads and 2,896 tokens."""

_CHECKED_TOKENS = 12
"""Tokens on which it is checked that a block computes a row by itself."""

_SAME = 1e-9
"""Largest distance of two results in float64 that are the same, relative to the largest element."""

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
"""Names under which blocks take a cache of keys and values; `cache` is that of transformers 5.24 and later."""

_PLACE_OF_BLOCK = ("layer_idx", "layer_index", "layer_id", "idx")
"""Attributes that tell a block's place in the model, and nothing of its kind."""

_FORCED_MASK = "transformers.masking_utils._ignore_causal_mask_sdpa"
"""Decides whether a mask that is causal is left to the kernel; the sampled rows need it written out."""


def rows_to_judge(tokens: int, windows: Iterable[int] = ()) -> torch.Tensor:
    """Return the tokens of a text whose rows are compared, ascending.

    They are both ends; powers of two and their neighbours, where tiles, blocks of keys and parts of a product end; the
    borders of sliding windows and of their multiples; and some at random.
    """
    chosen = {0, 1, 2, tokens - 3, tokens - 2, tokens - 1}
    borders = [1 << power for power in range(2, tokens.bit_length())]
    for window in windows:
        borders += [window, 2 * window, 3 * window]
    for border in borders:
        chosen.update((border - 1, border, border + 1))
    generator = np.random.Generator(np.random.PCG64(SEED))
    chosen.update(int(row) for row in generator.integers(0, tokens, _AT_RANDOM))
    return torch.tensor(sorted(row for row in chosen if 0 <= row < tokens))


def windows_of(model: torch.nn.Module) -> set[int]:
    """Return the widths of the sliding windows and chunks of a model's attention, by its config and its modules."""
    widths: set[int] = set()
    for module in (text_config(model), *model.modules()):
        for name in ("sliding_window", "window_size", "attention_chunk_size"):
            width = getattr(module, name, None)
            if isinstance(width, int) and not isinstance(width, bool) and width > 0:
                widths.add(width)
    return widths


def chosen_blocks(model: torch.nn.Module) -> list[str]:
    """Return the names of the blocks that stand for all: of each kind the first, the middle and the last one."""
    names_by_kind: dict[Any, list[str]] = {}
    for name, block in blocks_of(model).items():
        names_by_kind.setdefault(_kind_of(block), []).append(name)
    chosen: set[str] = set()
    for names in names_by_kind.values():
        chosen.update((names[0], names[len(names) // 2], names[-1]))
    return [name for name in blocks_of(model) if name in chosen]


def _kind_of(block: torch.nn.Module) -> Any:
    """Return what tells blocks apart that run other kernels: classes, shapes, and settings such as a window."""
    kind = []
    for name, module in block.named_modules():
        settings = []
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and key not in _PLACE_OF_BLOCK:
                settings.append((key, value))
        kind.append((name, type(module), tuple(settings)))
    shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
    return tuple(kind), shapes


def pick(value: torch.Tensor, tokens: int, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the sampled rows of a result of all tokens; a result of the sampled rows as it is, None of any other."""
    dim = token_dimension(value, tokens)
    if dim is not None:
        return value.index_select(dim, rows.to(value.device))
    return value if token_dimension(value, len(rows)) is not None else None


def token_dimension(value: torch.Tensor, tokens: int) -> int | None:
    """Return the dimension of a tensor of one sequence that has an entry for each token; None without one.

    Of a mask `(1, 1, queries, keys)` it is that of the queries.
    """
    shape = value.shape
    if value.dim() == 4 and shape[2] == tokens and shape[1] != tokens:
        return 2
    if value.dim() >= 2 and shape[0] == 1 and shape[1] == tokens:
        return 1
    if value.dim() >= 3 and shape[-2] == tokens:
        return value.dim() - 2
    if value.dim() in (1, 2) and shape[0] == tokens:
        return 0
    return None


def run_all_rows(model: torch.nn.Module, inputs: Activations, blocks: BlockPass, chosen: Iterable[str]) -> Activations:
    """Run the chosen blocks of a model on all tokens, and return its outputs on its device."""
    with torch.no_grad(), without_gradients(model), few_blocks(model, chosen), blocks.following(model):
        return outputs(model, inputs)


@contextmanager
def few_blocks(model: torch.nn.Module, chosen: Iterable[str]) -> Iterator[None]:
    """Let every other block of a model hand on what it gets, within a `with` block."""
    names = set(chosen)
    handing_on = _HandingOn()
    with ExitStack() as stack:
        for name, block in blocks_of(model).items():
            if name in names:
                stack.callback(block.register_forward_hook(handing_on.see).remove)
            else:
                stack.enter_context(_forward_replaced(block, handing_on.instead))
        yield


class _HandingOn:
    """Hand on what a block gets, in the form in which the block before it has returned its result."""

    def __init__(self) -> None:
        self._structure: Any = None

    def see(self, _: Any, __: Any, output: Any) -> None:
        """Note the form of a block's result."""
        leaves, self._structure = _pytree.tree_flatten(output)
        if sum(isinstance(leaf, torch.Tensor) for leaf in leaves) != 1 or not isinstance(leaves[0], torch.Tensor):
            raise Skip("its blocks hand on several tensors, so none can be left out")
        self._others = leaves[1:]

    def instead(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first tensor that a block gets in place of its result."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._structure is None:
            raise Skip("its first block is not called first")
        return _pytree.tree_unflatten([hidden, *self._others], self._structure)


@contextmanager
def _forward_replaced(block: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a function take the place of a module's `forward` within a `with` block; hooks are called as before."""
    own = vars(block).get("forward")

    # arguments keep the names that they have in the block's own code
    @functools.wraps(block.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    block.forward = call
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


class SampledPass:
    """A pass on the CPU in which the chosen blocks compute the sampled rows alone.

    Parameters
    ----------
    tokens, rows : int and torch.Tensor
        Tokens of the text, and those whose rows are computed.
    last : str
        Place of the result of the last block, after which only the sampled rows go on; empty where all have to.
    """

    def __init__(self, *, tokens: int, rows: torch.Tensor, last: str = "") -> None:
        self._tokens = tokens
        self._rows = rows
        self._last = last
        self.is_quiet = False
        """Whether a block is called for its keys, or to check its code: the results are not handed over."""
        self._computes_in_full: dict[str, bool] = {}
        """Whether a block is computed for all tokens, by its name."""

    def run(
        self,
        model: torch.nn.Module,
        inputs: Activations,
        given: Given,
        take: Take,
        chosen: Iterable[str],
        *,
        began: BlockBegan = no_listener,
    ) -> Activations:
        """Run the chosen blocks on given values of all tokens; hand over the sampled rows of results.

        Return the outputs of the model, in the sampled rows where there is a `last` block.
        """

        def give(name: str, value: torch.Tensor) -> torch.Tensor:
            whole = given(name, value)
            sampled = pick(whole, self._tokens, self._rows) if name == self._last else None
            return whole if sampled is None else sampled

        def take_rows(place: ResultPlace, result: torch.Tensor) -> None:
            sampled = None if self.is_quiet else pick(result, self._tokens, self._rows)
            if sampled is not None:
                take(place, sampled)

        names = list(chosen)
        with ExitStack() as stack:
            for name, block in blocks_of(model).items():
                if name in names:
                    stack.enter_context(_forward_replaced(block, functools.partial(self._forward, name, block.forward)))
            stack.enter_context(mock.patch(_FORCED_MASK, return_value=False))
            return run_all_rows(model, inputs, BlockPass(give, take_rows, began=began), names)

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the sampled rows of a block's result, in place of the result of its code."""
        args, kwargs = _by_name(forward, args, kwargs)
        cache = _cache_argument(forward, kwargs)
        if name not in self._computes_in_full:
            self._computes_in_full[name] = not cache or not self._is_by_rows(forward, cache, args, kwargs)
        if not self._computes_in_full[name]:
            return self._sampled(forward, cache, args, kwargs, self._tokens, self._rows)
        if self._tokens > _MOST_TOKENS_IN_FULL:
            raise Skip(f"its blocks compute all of {self._tokens} tokens or none")
        return forward(*args, **kwargs)

    def _sampled(
        self,
        forward: Callable[..., Any],
        cache: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: int,
        rows: torch.Tensor,
    ) -> Any:
        """Call a block's code with all tokens for their keys, and then with some rows of its arguments."""
        keys = _keys()
        was_quiet, self.is_quiet = self.is_quiet, True
        try:
            forward(*args, **{**kwargs, cache: keys})
        except _HasKeys:
            pass
        else:
            raise _NoKeys
        finally:
            self.is_quiet = was_quiet
        chosen = [_of_rows(argument, tokens, rows) for argument in args]
        by_name = {key: _of_rows(argument, tokens, rows) for key, argument in kwargs.items()}
        return forward(*chosen, **{**by_name, cache: keys})

    def _is_by_rows(
        self, forward: Callable[..., Any], cache: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Report whether a block's code gives the same row for a token alone as for all tokens, in float64."""
        count = min(_CHECKED_TOKENS, self._tokens)
        first = torch.arange(count)
        few = [_of_rows(argument, self._tokens, first, keys=count) for argument in args]
        few_by_name = {key: _of_rows(argument, self._tokens, first, keys=count) for key, argument in kwargs.items()}
        rows = torch.arange(count - 1, -1, -2).flip(0)
        self.is_quiet = True
        try:
            with torch.no_grad(), Float64Mode():
                whole = _first_tensor(forward(*few, **few_by_name))
                sampled = _first_tensor(self._sampled(forward, cache, tuple(few), few_by_name, count, rows))
        except Exception:  # the code of any model: one that cannot be called so is computed for all tokens
            return False
        finally:
            self.is_quiet = False
        expected = pick(whole, count, rows)
        if expected is None or expected.shape != sampled.shape:
            return False
        return float((sampled - expected).abs().max()) <= _SAME * float(expected.abs().max())


class _HasKeys(Exception):  # noqa: N818 - no error
    """End a block's code once its keys and values are known."""


class _NoKeys(Exception):  # noqa: N818 - no error
    """A block's code hands no keys and values to its cache."""


def _keys() -> Any:
    """Return a cache that ends the code which first hands keys and values to it, and returns these from then on."""
    from transformers import DynamicCache

    class Keys(DynamicCache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            if layer_idx in self.kept:
                return self.kept[layer_idx]
            self.kept[layer_idx] = key, value
            raise _HasKeys

    return Keys()


def _by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by name, as far as the code has names for them: GPT-2's cache has none."""
    parameters = inspect.signature(forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(named):
        return args, kwargs
    return (), {**dict(zip(named, args, strict=False)), **kwargs}


def _cache_argument(forward: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """Return the name under which a block takes a cache of keys; empty where it takes none, or has one already."""
    parameters = inspect.signature(forward).parameters
    for name in _CACHES:
        if name in kwargs or name in parameters:
            return name if kwargs.get(name) is None else ""
    return ""


def _of_rows(argument: Any, tokens: int, rows: torch.Tensor, keys: int | None = None) -> Any:
    """Return an argument of a block with some rows of its tensors; `keys`: as many of a mask's keys."""

    def rows_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = token_dimension(leaf, tokens)
        if dim is None:
            return leaf
        of_keys = keys is not None and leaf.dim() == 4 and leaf.shape[-1] == tokens
        chosen = leaf.index_select(dim, rows)
        return chosen[..., :keys] if of_keys else chosen

    return _pytree.tree_map(rows_of, argument)


def _first_tensor(output: Any) -> torch.Tensor:
    return next(leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
