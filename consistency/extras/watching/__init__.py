"""A watch over a training that goes on: what every rank holds and computes, at every so many steps."""
