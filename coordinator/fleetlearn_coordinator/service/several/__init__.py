"""What hosts with several runs need: what people do with the runs, and how each is served."""
