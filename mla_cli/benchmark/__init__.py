"""Decode and prefill, timed side by side."""
