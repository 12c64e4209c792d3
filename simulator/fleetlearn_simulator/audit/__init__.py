"""The audit of a private plan: attacks on the models that it releases, and what they prove of
epsilon."""
