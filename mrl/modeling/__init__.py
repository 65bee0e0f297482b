"""A model's forward pass as the trainer runs it: rows of samples, attention, the head. Engines attend with it too."""
