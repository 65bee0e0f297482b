"""Small things about this process and machine: threads, signals, shells, scratch space, units."""
