"""Carrying a session's commands out: the WebSocket, threads, the clock and random waiting times."""
