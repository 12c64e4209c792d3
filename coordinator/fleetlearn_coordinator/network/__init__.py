"""Sockets: listening, reading and writing within bounds."""
