"""What a run measured, for the tools in which people look at numbers: frames, Parquet, CSV, JSON
lines, TensorBoard and MLflow. The same of a coordinator's run and of a simulation."""
