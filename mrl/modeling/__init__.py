"""The trainer's forward pass: batches of tokens, attention, the output head. Engines use the attention too."""
