"""A fleet in virtual time: the coordinator's own engine, aggregation and local step, and devices that come and go."""
