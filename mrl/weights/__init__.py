"""Weights in transit: tensors, checksums, files, deltas, the network."""
