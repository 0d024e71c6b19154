"""The capture: what one worker saw, as files that travel."""
