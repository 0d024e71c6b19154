"""Outputs of another inference engine, judged in the stage `forward` like those of a device."""
