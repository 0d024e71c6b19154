"""Stage `operators`: single operations against float64."""
