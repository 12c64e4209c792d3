"""Gateways: processes that hold the devices' connections, for an engine process that has the
run."""
