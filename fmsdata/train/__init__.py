"""What a trainer saves beside its model: the train state."""
