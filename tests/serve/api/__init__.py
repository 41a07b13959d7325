"""What clients and operators get from a running server."""
