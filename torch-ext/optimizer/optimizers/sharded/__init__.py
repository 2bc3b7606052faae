"""What only several ranks need."""
