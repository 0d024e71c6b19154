"""Other inference engines: their answers to the inputs of a case, and the texts that they wrote."""
