"""A run: what is attempted when, scored, trained on, published, recorded, and how it goes on after a stop."""
