"""A vertical run: parties with other features of the same rows train a split model together."""
