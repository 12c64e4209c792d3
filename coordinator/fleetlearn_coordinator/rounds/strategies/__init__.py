"""How devices are chosen where a plan has rules for it."""
