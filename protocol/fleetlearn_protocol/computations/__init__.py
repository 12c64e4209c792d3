"""What both sides agree on of computations: what a bundle has in place of graphs, whose sums over
the rows of all devices the coordinator adds up (PROTOCOL.md, section 4, "Computations")."""
