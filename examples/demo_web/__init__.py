"""``make demo-web``: people draw digits in their browsers and train a model together with a few
devices."""
