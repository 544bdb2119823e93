"""What training.distill and training.diversify are made of: pairs of which a side is a model's translation."""
