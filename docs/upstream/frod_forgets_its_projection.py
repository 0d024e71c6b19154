"""PEFT: FRoD loads its projection V from the file, and keeps the U that it has computed from another V.

Needs torch and peft, no download and no GPU:

    python frod_forgets_its_projection.py
"""

import copy
import tempfile
from collections.abc import Callable
from unittest import mock

import peft
import torch
from peft.tuners.frod import model as frod
from peft.tuners.frod.layer import FrodLayer

SIGNS = torch.tensor([1.0, -1.0]).repeat(8)
"""Eigenvectors have no sign of their own: another machine's LAPACK may return the opposite of every other one."""


def answer(model: torch.nn.Module) -> torch.Tensor:
    """Return what a model makes of each input element by itself."""
    with torch.no_grad():
        return model(torch.eye(16))


def loaded(base: torch.nn.Module, folder: str, decompose: Callable[..., torch.Tensor]) -> torch.nn.Module:
    """Load the adapter on a machine that decomposes the base's weights so."""
    with mock.patch.object(frod, "_projection_from_weights", decompose):
        return peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def rebuilt(model: torch.nn.Module) -> torch.nn.Module:
    """Compute U from the V that was loaded."""
    for layer in model.modules():
        if isinstance(layer, FrodLayer):
            v, weight = layer.frod_V["default"], layer.base_layer.weight
            layer.frod_U["default"], _ = layer._calculate_frod_u_and_lambda(v, weight)
    return model


print(f"torch {torch.__version__}, peft {peft.__version__}")
torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
config = peft.FrodConfig(target_modules=["0", "1"], save_projection=True, progressbar=False)
tuned = peft.get_peft_model(copy.deepcopy(base), config).eval()
with torch.no_grad():
    for name, parameter in tuned.named_parameters():
        if "frod_lambda_l" in name:
            parameter.mul_(1.1)
wanted = answer(tuned)

here = frod._projection_from_weights
with tempfile.TemporaryDirectory() as folder:
    tuned.save_pretrained(folder)
    same = loaded(base, folder, here)
    other = loaded(base, folder, lambda *given: here(*given) * SIGNS)
print(f"answers are up to {wanted.abs().max():.2g}; an adapter with save_projection=True, loaded")
print(f"where V is computed as it was saved: off by at most {(answer(same) - wanted).abs().max():.2g}")
print(f"where eigenvectors have other signs: off by at most {(answer(other) - wanted).abs().max():.2g}")
print(f"the same, U computed again from the file's V: {(answer(rebuilt(other)) - wanted).abs().max():.2g}")
