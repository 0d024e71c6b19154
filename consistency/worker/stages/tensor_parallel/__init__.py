"""Stage `tensor-parallel`: a model whose layers are split over the ranks of a group."""
