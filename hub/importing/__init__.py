"""What `hub.import_checkpoint` is made of: reading a file, finding its layout, converting, comparing."""
