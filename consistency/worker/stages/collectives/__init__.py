"""Stage `collectives`: what the ranks of one group send each other and add up, without a model."""
