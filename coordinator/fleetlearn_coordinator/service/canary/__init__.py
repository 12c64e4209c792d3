"""A new plan, bundle or model for a few devices first: when it goes on to more, and when it goes
back."""
