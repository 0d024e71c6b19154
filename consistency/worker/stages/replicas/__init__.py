"""Stage `replicas`: training by DistributedDataParallel."""
