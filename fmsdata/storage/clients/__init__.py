"""Clients: one request to a filesystem each. One file for each kind of filesystem."""
