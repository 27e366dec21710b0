"""Predictions as tables, JSON and plots."""
