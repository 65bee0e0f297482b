"""Evaluation tests: the rows they are about, the test itself, what it says of rollouts. Who runs them is elsewhere."""
