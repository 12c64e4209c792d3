"""Training a split model between parties: how rows are aligned, which rows a step takes, and what
is said."""
