"""The declaration of an inference engine: its arithmetic by default, and the class that runs it here. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEngine:
    """An inference engine.

    Attributes
    ----------
    title : str
        The name that its project gives it.
    compiler : str
        Class that runs it in a process of this package, as `module:Class`; empty where it runs by itself alone.
    kv_dtypes : mapping of str to str
        Dtype in which it keeps keys and values by default, by the dtype of the model, where that is another one.
    computes_in : mapping of str to str
        Dtype in which it computes by default, by the dtype of the model, where that is another one.
    processed_by : tuple of str
        Settings of the sampler that its log probabilities are taken after; none where they are the model's own.
    source : str
        Where that is stated: a file of its source code, or an option of it with its default.
    version : str
        The version whose source was read, or that was run.
    """

    title: str
    compiler: str = ""
    kv_dtypes: Mapping[str, str] = field(default_factory=dict)
    computes_in: Mapping[str, str] = field(default_factory=dict)
    processed_by: tuple[str, ...] = ()
    source: str = ""
    version: str = ""
