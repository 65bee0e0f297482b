"""One actor in several processes, its ranks: each takes a share of every step, and all hold the same policy."""
