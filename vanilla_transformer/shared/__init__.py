"""What the commands of `training` and `hub`, which do not import each other, have in common."""
