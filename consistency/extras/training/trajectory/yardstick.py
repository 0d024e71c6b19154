"""The exact trajectory of the adapter, and those that rounding makes of it: the yardstick of every device's own.

The optimizer divides a gradient by its own magnitude, so an element whose gradient is nearly zero goes either way by a
whole step, and from there on two healthy trainings part. How far is no multiple of one step's rounding: it is seen in
trainings on the CPU with random rounding errors. These are facts for a curve; no device is judged by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from consistency.devices.products import Products
from consistency.extras.training.trajectory.passes import TrainingPass, TrainingPasses
from consistency.extras.training.trajectory.passes_of_steps import NOISE, TRAININGS
from consistency.numerics.file_tensor import Readable, elements_of, mapped
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.model.float64_reference import Reference, Tables, publish_file
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.protocol import TRAJECTORY_FILE
from consistency.worker.training import adamw
from consistency.worker.training.backward import Tensors

FIGURES = ("loss", "norm", "distance")
"""What a curve shows of each step: the loss, the norm of all gradients, and the adapter's distance from float64."""

_PIECE = 1 << 20
"""Elements of a tensor whose distance is taken at once: 8 MiB."""


def noise(products: str) -> str:
    """Return the name of the figures of the trainings with noise, by the name of their products."""
    return f"noise/{products}"


class ExactTraining:
    """A training of float64 parameters by exact gradients, by blocks, which each step takes rounded into the dtype."""

    def __init__(self, context: Context, passes: TrainingPasses, start: Tensors, steps: int) -> None:
        self._context = context
        self._passes = passes
        self._start = start
        self._steps = steps
        self._titles = cpu_error.products_of_run(context.job, passes.model)
        is_large = cpu_error.is_large(cpu_error.passes_for(passes.multiplications))
        self._trainings = 1 if is_large else TRAININGS
        layout = {name: (torch.float64, (steps, *tensor.shape)) for name, tensor in start.items()}
        layout |= dict.fromkeys(FIGURES[:2], (torch.float64, (1, steps)))
        layout |= {noise(title): (torch.float64, (self._trainings, len(FIGURES), steps)) for title in self._titles}
        self._names = tuple(layout)
        self._file = TensorFile(context.scratch / f"{TRAJECTORY_FILE}.tmp", layout)
        self._masters = {name: torch.nn.Parameter(tensor.to(torch.float64)) for name, tensor in start.items()}
        self._optimizer = adamw.optimizer_of(self._masters.values())
        self._figures = torch.zeros(2, steps, dtype=torch.float64)

    @property
    def parameters(self) -> Tensors:
        """The parameters before the next step, in the model's dtype."""
        return {name: master.detach().to(self._passes.parameters[name].dtype) for name, master in self._masters.items()}

    def take(self, step: int, taken: TrainingPass) -> None:
        """Take a step by exact gradients."""
        self._figures[:, step] = torch.tensor([taken.loss, taken.norm])
        for name, master in self._masters.items():
            master.grad = taken.gradients[name]
        self._optimizer.step()
        for name, master in self._masters.items():
            self._file.write(name, step, master.detach())

    def publish(self) -> None:
        """Train with noise too, and write all for all workers."""
        for figure, values in zip(FIGURES, self._figures, strict=False):
            self._file.write(figure, 0, values)
        every = [(title, seed) for title in self._titles for seed in range(self._trainings)]
        events = self._context.events
        for number, (title, seed) in enumerate(every):
            self._passes.begin(self._start)
            with events.passes(NOISE), events.part_of_stage(number / len(every), (number + 1) / len(every)):
                products = self._titles[title]
                found = _train_with_noise(self._context, self._passes, self._file, products, seed, self._steps)
            self._file.write(noise(title), seed, found)
        self.close()
        tables = Tables(failures={}, names=self._names)
        publish_file(self._file.path, self._context.scratch / TRAJECTORY_FILE, tables)

    def close(self) -> None:
        self._file.close()


def _train_with_noise(
    context: Context, passes: TrainingPasses, file: TensorFile, products: Products, seed: int, steps: int
) -> torch.Tensor:
    """Train on the CPU as a healthy device may, and return its figures, `(figures, steps)`."""
    optimizer, figures = adamw.optimizer_of(passes.parameters.values()), torch.zeros(3, steps, dtype=torch.float64)
    for step in range(steps):
        context.events.step(f"training, noise {seed + 1}", step, steps)
        with cpu_error.with_noise(products, seed * steps + step):
            taken = passes.take(step)
            for name, parameter in passes.parameters.items():
                parameter.grad = taken.gradients[name]
            optimizer.step()
        distance = distance_from(passes.parameters.items(), file, step)
        figures[:, step] = torch.tensor([taken.loss, taken.norm, distance])
    optimizer.zero_grad()
    return figures


def distance_from(parameters: Iterable[tuple[str, Readable]], exact: TensorFile | Reference, step: int) -> float:
    """Return how far an adapter is from the float64 trajectory after a step: the root of the sum of all squares."""
    total = 0.0
    for name, tensor in parameters:
        of_all = exact.read(name)
        if of_all is None:
            continue
        size = math.prod(tensor.shape)
        own, read = elements_of(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor), elements_of(of_all)
        for first in range(0, size, _PIECE):
            last = min(size, first + _PIECE)
            wide = read(slice(step * size + first, step * size + last))
            total += float((own(slice(first, last)).to("cpu", torch.float64) - wide).square().sum())
    return math.sqrt(total)


def known_figures(reference: Reference, products: str) -> dict[str, list[float | None]]:
    """Return the figures of the float64 training, and the least and the most of those with noise, step by step.

    Parameters
    ----------
    products : str
        By which the device computes; where no training had these, those with products in float32 are taken.
    """
    found: dict[str, list[float | None]] = {}
    for figure in FIGURES[:2]:
        exact = reference.read(figure)
        if exact is not None:
            found[f"float64_{figure}"] = finite(mapped(exact)[0].tolist())
    drawn = reference.read(noise(products))
    drawn = reference.read(noise(cpu_error.PLAIN)) if drawn is None else drawn
    if drawn is not None:
        least, most = mapped(drawn).amin(0), mapped(drawn).amax(0)
        for number, figure in enumerate(FIGURES):
            found[f"noise_least_{figure}"] = finite(least[number].tolist())
            found[f"noise_most_{figure}"] = finite(most[number].tolist())
    return found


def finite(values: Iterable[float]) -> list[float | None]:
    """Return numbers for a report: None in the place of what is not finite."""
    return [value if math.isfinite(value) else None for value in values]
