"""Reads training logs and says what went wrong first."""
