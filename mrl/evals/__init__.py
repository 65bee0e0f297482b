"""Measuring a model without training it."""
