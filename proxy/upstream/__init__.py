"""The side of the API: WebSocket connections, and plain HTTP for everything else."""
