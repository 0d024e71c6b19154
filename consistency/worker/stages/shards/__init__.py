"""Stage `shards`: training by FSDP2, whose ranks each hold a part of every tensor."""
