"""Cases: their options, load paths and tolerances, and the checks that are made before a worker starts."""
