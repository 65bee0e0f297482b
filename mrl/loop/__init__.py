"""A run: what is attempted when, scored, trained on, published, recorded, and resumed."""
