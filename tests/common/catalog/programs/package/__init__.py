"""Package of a user."""
