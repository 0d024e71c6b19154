"""Stage `trajectory`: some steps of training on each device alone."""
