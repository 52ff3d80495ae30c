"""One file a command: options in, one plain call, result printed. Heavy imports stand inside the functions."""
