"""Stage `sharding`: the model split over several devices."""
