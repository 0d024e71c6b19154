"""The watch of a training by transformers' Trainer, and by what derives from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from consistency.extras.watching.outcome import Discovery
from consistency.extras.watching.training_watch import OnFinding, Watch

_FOLDER = "watch"


class Callback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Watch a training by transformers' Trainer.

    Parameters
    ----------
    every, on_finding, timeout_s, beside
        As of `Watch`; `stop` has the Trainer save a checkpoint first.
    output : path, optional
        Folder of the results; by default `watch` in the Trainer's output folder.
    resumed_from : path, optional
        Checkpoint from which the training goes on; by default that of the step at which the Trainer begins.
    """

    def __init__(
        self,
        every: int = 200,
        *,
        on_finding: OnFinding = "warn",
        output: str | Path | None = None,
        resumed_from: str | Path | None = None,
        timeout_s: float = 600.0,
        beside: bool | None = None,
    ) -> None:
        self.watch: Watch | None = None
        self._options: dict[str, Any] = {
            "every": every,
            "on_finding": on_finding,
            "timeout_s": timeout_s,
            "beside": beside,
        }
        self._output, self._resumed_from = output, resumed_from

    @property
    def findings(self) -> list[Discovery]:
        """Return what the watch has found."""
        return [] if self.watch is None else self.watch.findings

    def add_to(self, trainer: Any) -> None:
        """Add this callback to a Trainer in front of all others, so that its figures reach TensorBoard and the like.

        A Trainer puts the callbacks that it is given behind those of its loggers, and each sees what those before it
        have added to a log.
        """
        trainer.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    # the Trainer calls every method with the same arguments
    # ruff: noqa: ARG002

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        step = int(state.global_step)
        resumed_from = self._resumed_from
        if resumed_from is None and step:
            resumed_from = Path(args.output_dir) / f"checkpoint-{step}"
        self.watch = Watch(
            kwargs["model"],
            kwargs["optimizer"],
            output=self._output or Path(args.output_dir) / _FOLDER,
            first_step=step,
            resumed_from=resumed_from,
            **self._options,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, where a finding asks for it: the Trainer saves a checkpoint in its own way first."""
        if self.watch is not None and self.watch.should_stop:
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add figures of the watch to what is logged."""
        if self.watch is not None and logs is not None:
            logs.update(self.watch.metrics)
            if state.log_history:
                state.log_history[-1].update(self.watch.metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()
