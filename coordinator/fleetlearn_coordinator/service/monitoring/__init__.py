"""What tells other programs how a coordinator does: metrics for Prometheus, health, alerts."""
