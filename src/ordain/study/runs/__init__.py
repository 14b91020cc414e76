"""Training runs: what is asked for, what is trained, and what is written down."""
