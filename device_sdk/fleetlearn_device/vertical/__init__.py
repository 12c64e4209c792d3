"""A party of a vertical run: it trains its bottom of a split model on its own features."""
