"""The real training of simulated devices, in this process, in several processes or on a Ray
cluster."""
