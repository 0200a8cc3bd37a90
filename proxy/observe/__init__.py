"""What is watched: logs, metrics and the admin listener. Nobody waits for this package."""
