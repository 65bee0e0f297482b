"""The worker that trains, and its parts."""
