"""The actor: the worker that trains the policy, and its parts."""
