"""What a step learns from its groups: the batch, shaped rewards, metrics, why attempts failed."""
