"""Record the modules that multiply in a half type on this device, and are to multiply in float32."""

from __future__ import annotations

from consistency.capture.names import WHOLE_MODEL
from consistency.case import standard
from consistency.numerics import words
from consistency.worker.context import Context
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.running import Activations, model_code
from consistency.worker.product_types import kept_wide, product_types

PRODUCTS = "products"
"""Name of the fact: in which dtype a module multiplies."""

_WORDS = {"bfloat16": words.ROUNDED_TO_BF16, "float16": words.ROUNDED_TO_FP16}


def record_narrow_products(context: Context, inputs: Activations, reference: Reference) -> None:
    """Record each module that multiplies in a half type here and in float32 on the CPU, or whose class says float32."""
    model = context.model
    with model_code(model):
        own = product_types(model, inputs)
    if not own:
        return
    kept = kept_wide(model, list(own))
    wide = {module for module, dtype in reference.tables.product_types.items() if dtype == "float32"}
    narrow = [module for module, dtype in own.items() if dtype in _WORDS and module in kept | wide]
    for module in narrow:
        if not context.record.wants(standard.FORWARD, module):
            continue
        dtype = own[module]
        why = "its class keeps it in float32" if module in kept else "the CPU computes it in float32 by the same code"
        context.record.fact(
            standard.FORWARD,
            module,
            PRODUCTS,
            status="outside",
            word=_WORDS[dtype],
            evidence={"got": dtype, "wanted": "float32"},
            reason=f"{module} multiplies in {dtype} here, and {why}",
        )
    if not narrow and context.record.wants(standard.FORWARD, WHOLE_MODEL):
        count = len(kept | (wide & own.keys()))
        context.record.fact(
            standard.FORWARD, WHOLE_MODEL, PRODUCTS, status="equal", evidence={"modules": len(own), "in_float32": count}
        )
