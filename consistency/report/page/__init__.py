"""The parts of `report.html`: what the page draws, as plain values, and its template, style and script."""
