"""The last result in a line or in metrics, for whoever asks every few seconds."""
