"""The side of the client: routes, limits, and the driver of each turn."""
