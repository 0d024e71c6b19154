"""The stages of the level `standard`: each a folder that the rest of the package finds."""
