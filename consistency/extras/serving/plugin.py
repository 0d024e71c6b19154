"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_CHECK_TEXT = "consistency.extras.serving.check_text"
_GENERATION = "consistency.extras.serving.generation"
_ENGINE_OUTPUTS = "consistency.extras.serving.engine_outputs"
_ENGINES = "consistency.extras.serving.engines"

PLUGIN = Plugin(
    name="serving",
    options=("engine_outputs",),
    stages=(f"{_GENERATION}.spec:SPEC",),
    faults=(f"{_GENERATION}.faults:ROWS",),
    kinds=(
        "consistency.extras.serving.causes:Cause",
        "consistency.extras.serving.kinds:KINDS",
    ),
    finders=(f"{_GENERATION}.findings:UNDECIDED_TEXTS", f"{_ENGINE_OUTPUTS}.findings:ENGINES"),
    sections=(f"{_GENERATION}.page:SECTION",),
    case_checks=("consistency.extras.serving.inference.checks:check_engine_files",),
    engine_captures=("consistency.extras.serving.inference.of_captures:judged",),
    output_judges=(f"{_ENGINE_OUTPUTS}.judging:JUDGE",),
    commands={
        "inputs": f"{_ENGINES}.command",
        "engine": f"{_ENGINES}.command",
        "check-text": f"{_CHECK_TEXT}.command",
    },
    # these import torch when they are used
    api={
        "Text": f"{_CHECK_TEXT}.texts",
        "TextReport": f"{_CHECK_TEXT}.report",
        "TextOptions": f"{_CHECK_TEXT}.options",
        "Sampling": f"{_CHECK_TEXT}.sampling",
        "check_text": f"{_CHECK_TEXT}.judge_texts",
        "check_rollouts": f"{_CHECK_TEXT}.judge_texts",
    },
)
