"""Training runs: configuration, jobs, worker processes and records."""
