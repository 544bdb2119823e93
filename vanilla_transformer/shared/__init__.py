"""Code shared by the commands of `training` and `hub`, which do not import each other."""
