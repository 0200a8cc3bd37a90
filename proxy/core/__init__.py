"""The core decides and does no I/O: no clock, no socket, no log; see `proxy` for the map."""
