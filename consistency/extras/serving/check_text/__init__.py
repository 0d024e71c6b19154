"""Whether a model could have written a text, and whether its log probabilities are the model's."""
