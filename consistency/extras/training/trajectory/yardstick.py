"""The exact trajectory of the adapter, and trajectories with rounding noise: the yardstick of every device's own.

The optimizer divides a gradient by its own magnitude, so an element whose gradient is nearly zero goes either way by a
whole step, and from there on two healthy trainings part. How far is no multiple of one step's rounding: it is seen in
trainings on the CPU with random rounding errors. These are facts for a curve; no device is judged by them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

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
"""Figures of a curve, step by step: the loss, the norm of all gradients, and the adapter's distance from float64."""

_PIECE = 1 << 20
"""Elements of a tensor whose distance is taken at once: 8 MiB."""


def noise_name(products: str) -> str:
    """Return the name, in the file, of the figures of the trainings with noise, from the name of their products."""
    return f"noise/{products}"


class ExactTraining:
    """A training of float64 parameters by exact gradients, by blocks; each pass takes them rounded into the dtype.

    Parameters
    ----------
    passes : TrainingPasses
        Passes of the model on the CPU.
    start : dict
        Parameters before the first step, on the CPU.
    """

    def __init__(self, context: Context, passes: TrainingPasses, start: Tensors, steps: int) -> None:
        self._context = context
        self._passes = passes
        self._start = start
        self._steps = steps
        self._products = cpu_error.products_of_run(context.job, passes.model)
        # one training of a large model is a good part of the work
        is_large = cpu_error.is_large(cpu_error.passes_for(passes.multiplications))
        self._noisy_trainings = 1 if is_large else TRAININGS
        # parameters and figures of the exact training, and figures of the noisy ones
        layout = {name: (torch.float64, (steps, *tensor.shape)) for name, tensor in start.items()}
        layout |= dict.fromkeys(FIGURES[:2], (torch.float64, (1, steps)))
        noise_shape = (self._noisy_trainings, len(FIGURES), steps)
        layout |= {noise_name(products): (torch.float64, noise_shape) for products in self._products}
        self._names = tuple(layout)
        self._file = TensorFile(context.scratch / f"{TRAJECTORY_FILE}.tmp", layout)
        self._masters = {name: torch.nn.Parameter(tensor.to(torch.float64)) for name, tensor in start.items()}
        self._optimizer = adamw.optimizer_of(self._masters.values())
        self._figures = torch.zeros(2, steps, dtype=torch.float64)

    @property
    def parameters(self) -> Tensors:
        """The parameters before the next step, in the model's dtype."""
        return {name: master.detach().to(self._passes.parameters[name].dtype) for name, master in self._masters.items()}

    def take_step(self, step: int, result: TrainingPass) -> None:
        """Update the parameters by the exact gradients of a pass, and keep its figures."""
        self._figures[:, step] = torch.tensor([result.loss, result.norm])
        for name, master in self._masters.items():
            master.grad = result.gradients[name]
        self._optimizer.step()
        for name, master in self._masters.items():
            self._file.write(name, step, master.detach())

    def publish(self) -> None:
        """Train with noise too, and write the results of all trainings for all workers."""
        for figure, values in zip(FIGURES, self._figures, strict=False):
            self._file.write(figure, 0, values)
        trainings = list(itertools.product(self._products, range(self._noisy_trainings)))
        events = self._context.events
        for number, (products_name, seed) in enumerate(trainings):
            # every training begins with the same parameters
            self._passes.set_parameters(self._start)
            with events.passes(NOISE), events.part_of_stage(number / len(trainings), (number + 1) / len(trainings)):
                products = self._products[products_name]
                figures = _train_with_noise(self._context, self._passes, self._file, products, seed, self._steps)
            self._file.write(noise_name(products_name), seed, figures)
        # complete, and under its own name only then: workers wait for it
        self.close()
        tables = Tables(failures={}, names=self._names)
        publish_file(self._file.path, self._context.scratch / TRAJECTORY_FILE, tables)

    def close(self) -> None:
        self._file.close()


def _train_with_noise(
    context: Context, passes: TrainingPasses, file: TensorFile, products: Products, seed: int, steps: int
) -> torch.Tensor:
    """Train on the CPU as a healthy device may, and return the figures, `(figures, steps)`."""
    optimizer = adamw.optimizer_of(passes.parameters.values())
    figures = torch.zeros(len(FIGURES), steps, dtype=torch.float64)
    for step in range(steps):
        context.events.step(f"training, noise {seed + 1}", step, steps)
        # each step of each training has a seed of its own
        with cpu_error.with_noise(products, seed * steps + step):
            result = passes.run_pass(step)
            for name, parameter in passes.parameters.items():
                parameter.grad = result.gradients[name]
            optimizer.step()
        distance = distance_to_exact(passes.parameters.items(), file, step)
        figures[:, step] = torch.tensor([result.loss, result.norm, distance])
    optimizer.zero_grad()
    return figures


def distance_to_exact(parameters: Iterable[tuple[str, Readable]], exact: TensorFile | Reference, step: int) -> float:
    """Return the distance of an adapter from the float64 trajectory after a step: the root of the sum of all squares.

    Parameters
    ----------
    parameters : iterable of (str, tensor)
        The adapter's parameters by name, on any device or in a file.
    exact : TensorFile or Reference
        Has the exact parameters of all steps, `(steps, *shape)`; a parameter that it does not have is left out.
    """
    total = 0.0
    for name, tensor in parameters:
        exact_of_all_steps = exact.read(name)
        if exact_of_all_steps is not None:
            for squared_distance in _squared_distances(tensor, exact_of_all_steps, step):
                total += squared_distance
    return math.sqrt(total)


def _squared_distances(tensor: Readable, exact_of_all_steps: Readable, step: int) -> Iterator[float]:
    """Yield the squared distance of each piece of a tensor from its exact value after a step."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach()
    size = math.prod(tensor.shape)
    read_actual, read_exact = elements_of(tensor), elements_of(exact_of_all_steps)
    for start in range(0, size, _PIECE):
        stop = min(size, start + _PIECE)
        exact = read_exact(slice(step * size + start, step * size + stop))
        actual = read_actual(slice(start, stop)).to("cpu", torch.float64)
        yield float((actual - exact).square().sum())


def reference_figures(reference: Reference, products: str) -> dict[str, list[float | None]]:
    """Return the figures of the float64 training, and the least and the most of noisy trainings, step by step.

    Parameters
    ----------
    products : str
        Name of the device's products; where no noisy training had these, products in float32 take their place.
    """
    figures: dict[str, list[float | None]] = {}
    for name in FIGURES[:2]:
        exact = reference.read(name)
        if exact is not None:
            figures[f"float64_{name}"] = finite_or_none(mapped(exact)[0].tolist())
    noisy = reference.read(noise_name(products))
    if noisy is None:
        noisy = reference.read(noise_name(cpu_error.PLAIN))
    if noisy is not None:
        least, most = mapped(noisy).amin(0), mapped(noisy).amax(0)
        for number, name in enumerate(FIGURES):
            figures[f"noise_least_{name}"] = finite_or_none(least[number].tolist())
            figures[f"noise_most_{name}"] = finite_or_none(most[number].tolist())
    return figures


def finite_or_none(values: Iterable[float]) -> list[float | None]:
    """Return numbers for a report, with None in the place of infinities and NaN."""
    return [value if math.isfinite(value) else None for value in values]
